"""Names: the tables of rl-post-training.md 7.3 and lora.md 3.2."""

from __future__ import annotations

import pytest

from drl.lora import LoraError, to_plain_name, to_pushed_name
from drl.lora.naming import split_adapter_key


@pytest.mark.parametrize(
    ("name", "plain"),
    [
        ("base_model.model.blocks.0.attn.to_q.base_layer.weight", "blocks.0.attn.to_q.weight"),
        ("base_model.model.blocks.0.norm1.weight", "blocks.0.norm1.weight"),
        ("blocks.0.norm1.weight", "blocks.0.norm1.weight"),
        ("to_q.base_layer", "to_q"),
        ("_fsdp_wrapped_module.blocks.0._fsdp_wrapped_module.to_q.weight", "blocks.0.to_q.weight"),
        ("_orig_mod.base_model.model.proj.base_layer.bias", "proj.bias"),
        (
            "blocks.3._checkpoint_wrapped_module.attn.to_out.0.base_layer.weight",
            "blocks.3.attn.to_out.0.weight",
        ),
        ("lora_head.base_layer.weight", "lora_head.weight"),
        ("my_base_layer.weight", "my_base_layer.weight"),
        ("weight_embed.weight", "weight_embed.weight"),
        ("base_model.encoder.weight", "base_model.encoder.weight"),
        ("", ""),
    ],
)
def test_plain_name_strips_wrappers_by_component(name: str, plain: str) -> None:
    assert to_plain_name(name) == plain


@pytest.mark.parametrize(
    ("key", "pushed"),
    [
        ("base_model.model.blocks.0.attn.to_q.base_layer.weight", "blocks.0.attn.to_q.weight"),
        ("base_model.model.transformer_blocks.0.norm1.weight", "transformer_blocks.0.norm1.weight"),
        ("transformer_blocks.0.norm1.weight", "transformer_blocks.0.norm1.weight"),
        (
            "base_model.model.transformer_blocks.0.attn.to_q.lora_A.default.weight",
            "transformer_blocks.0.attn.to_q.lora_A",
        ),
        (
            "base_model.model.transformer_blocks.1.attn.add_k_proj.lora_B.weight",
            "transformer_blocks.1.attn.add_k_proj.lora_B",
        ),
        ("to_q.lora_A", "to_q.lora_A"),
        ("to_q.lora_B.default", "to_q.lora_B"),
        ("to_q.lora_A.lora_B.weight", "to_q.lora_A"),
        ("to_q.lora_B.base_layer.weight", "to_q.lora_B"),
        ("to_q.lora_A.weight.weight", "to_q.lora_A"),
        ("_orig_mod.blocks.0.attn.to_q.lora_A.attn.weight", "blocks.0.attn.to_q.lora_A"),
        ("lora_head.lora_A.default.weight", "lora_head.lora_A"),
        ("lora_head.bias", "lora_head.bias"),
    ],
)
def test_pushed_name_of_training_key(key: str, pushed: str) -> None:
    assert to_pushed_name(key) == pushed


@pytest.mark.parametrize(
    "key",
    [
        "to_q.lora_A.default.bias",
        "base_layer.weight",
        "to_q.lora_A.default.extra.weight",
        "base_model.encoder.weight",
        "lora_A.weight",
    ],
)
def test_leftover_wrapping_in_a_pushed_name_is_refused(key: str) -> None:
    with pytest.raises(LoraError, match="pushed name"):
        to_pushed_name(key)


def test_a_key_without_matrix_component_is_no_adapter_key() -> None:
    assert split_adapter_key("lora_head.weight") is None
    assert split_adapter_key("to_q.base_layer.weight") is None

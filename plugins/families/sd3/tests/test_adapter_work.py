"""Training work with frozen weights, against what torch counts on a model with real adapters."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from diffusers import SD3Transformer2DModel
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from drl.api import RowShape
from drl.lora import LoraConfig, inject
from drl.lora.work import adapter_flops
from drl_family_sd3.family import LORA_TARGETS, Sd3Family
from drl_family_sd3.flops import layer_tokens, row_flops

CONFIG: dict[str, Any] = {
    "sample_size": 8,
    "patch_size": 2,
    "in_channels": 4,
    "out_channels": 4,
    "attention_head_dim": 16,
    "num_attention_heads": 2,
    "joint_attention_dim": 24,
    "caption_projection_dim": 32,
    "pooled_projection_dim": 20,
    "pos_embed_max_size": 16,
    "qk_norm": "rms_norm",
}
RANK, WIDTH = 3, 32
MEDIUM: dict[str, Any] = {
    "num_layers": 24,
    "attention_head_dim": 64,
    "num_attention_heads": 24,
    "patch_size": 2,
    "in_channels": 16,
    "out_channels": 16,
    "joint_attention_dim": 4096,
    "caption_projection_dim": 1536,
    "pooled_projection_dim": 2048,
    "dual_attention_layers": list(range(13)),
}


def adapted(config: dict[str, Any], targets: tuple[str, ...] = LORA_TARGETS) -> nn.Module:
    model = SD3Transformer2DModel.from_config(config)
    lora = LoraConfig(rank=RANK, alpha=RANK, target_modules=targets)
    inject(model, lora, generator=torch.Generator().manual_seed(0))
    return model


def counted(model: nn.Module, shape: RowShape) -> tuple[int, int]:
    """Return what torch counts in a forward, and in a forward with its backward."""
    inputs = {
        "hidden_states": torch.randn(1, *shape.latent),
        "timestep": torch.ones(1),
        "encoder_hidden_states": torch.randn(1, shape.text_tokens, 24),
        "pooled_projections": torch.randn(1, 20),
    }
    counter = FlopCounterMode(display=False)
    with counter, sdpa_kernel(SDPBackend.MATH):  # the fused CPU kernel is not counted
        output = model(**inputs).sample
        forward = counter.get_total_flops()
        output.sum().backward()
    return forward, counter.get_total_flops()


@pytest.mark.parametrize(("layers", "dual"), [(2, []), (3, [0]), (3, [0, 1])])
@pytest.mark.parametrize(("height", "width", "tokens"), [(8, 8, 3), (4, 12, 7)])
def test_training_work_under_adapters_is_what_torch_counts(
    layers: int, dual: list[int], height: int, width: int, tokens: int
) -> None:
    config = CONFIG | {"num_layers": layers, "dual_attention_layers": dual}
    shape = RowShape(latent=(4, height, width), text_tokens=tokens)
    model = adapted(config)
    work = row_flops(config, shape)
    adapters = adapter_flops(model, lambda layer: layer_tokens(config, shape, layer))
    forward, both = counted(model, shape)
    assert forward == work.forward + adapters
    image = (height // 2) * (width // 2)
    # what enters the first block depends on nothing trained: its three A per stream need no input gradient
    spared = 2 * RANK * WIDTH * 3 * (image + tokens)
    assert both == work.training(frozen=True) + 3 * adapters - spared


def test_full_training_is_three_forwards() -> None:
    work = row_flops(CONFIG | {"num_layers": 2}, RowShape(latent=(4, 8, 8), text_tokens=3))
    assert work.training(frozen=False) == 3 * work.forward


def test_work_of_the_medium_model_by_hand() -> None:
    """2.44 TFLOP per forward at 512 x 512 is what torch counted on the real module."""
    shape = RowShape(latent=(16, 64, 64), text_tokens=333)
    work = row_flops(MEDIUM, shape)
    assert work.forward == pytest.approx(2.44e12, rel=2e-3)
    square, width = 1536**2, 1536
    attention = 4 * width * (24 * 1357**2 + 13 * 1024**2)
    projections = (
        2 * square * (7 * 1024 + 3 * 333)
    )  # of the first block: q, k, v twice, out once, of text
    second = 8 * width * 1024**2
    modulation = 2 * square * (13 * 9 + 11 * 6 + 23 * 6 + 2 + 2)
    entry = 2 * (4 * 16 * width * 1024 + 4096 * width * 333 + width * (256 + 2048 + 2 * width))
    spared = projections + second + modulation + entry
    assert work.input_gradient == work.forward + attention - spared
    adapters = 0
    for block in range(24):
        image, text = 1024, 333
        outs = 4 * image + (3 if block == 23 else 4) * text
        adapters += 2 * 32 * (1536 + 1536) * outs
    assert adapters == pytest.approx(0.0257e12, rel=2e-2)


@pytest.mark.parametrize(
    ("layer", "rows"),
    [
        ("pos_embed.proj", 24),
        ("context_embedder", 7),
        ("time_text_embed.timestep_embedder.linear_1", 1),
        ("transformer_blocks.0.norm1.linear", 1),
        ("transformer_blocks.0.norm1_context.linear", 1),
        ("transformer_blocks.0.attn.to_q", 24),
        ("transformer_blocks.0.attn.to_out.0", 24),
        ("transformer_blocks.0.attn.add_k_proj", 7),
        ("transformer_blocks.0.attn.to_add_out", 7),
        ("transformer_blocks.0.attn2.to_v", 24),
        ("transformer_blocks.0.ff.net.0.proj", 24),
        ("transformer_blocks.0.ff_context.net.2", 7),
        ("norm_out.linear", 1),
        ("proj_out", 24),
    ],
)
def test_tokens_of_a_layer(family: Sd3Family, layer: str, rows: int) -> None:
    shape = RowShape(latent=(4, 8, 24), text_tokens=7)
    config = CONFIG | {"num_layers": 2}
    assert (
        family.layer_rows("transformer", config, shape, layer) == 2 * rows if rows == 24 else rows
    )


def test_adapters_on_every_linear_layer_are_counted_by_their_own_tokens() -> None:
    config = CONFIG | {"num_layers": 2, "dual_attention_layers": [0]}
    shape = RowShape(latent=(4, 8, 4), text_tokens=5)
    model = adapted(
        config, ("linear", "proj", "to_q", "add_q_proj", "context_embedder", "proj_out")
    )
    adapters = adapter_flops(model, lambda layer: layer_tokens(config, shape, layer))
    forward, _ = counted(model, shape)
    assert forward == row_flops(config, shape).forward + adapters

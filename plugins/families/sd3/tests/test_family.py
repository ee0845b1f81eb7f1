"""Conditions, forward, guidance, work and claims of family sd3."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from diffusers import SD3Transformer2DModel
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from drl.api import (
    BadInput,
    CheckpointFacts,
    ConditionRecord,
    ContractError,
    Guidance,
    RowShape,
    WeightSource,
)
from drl_family_sd3.family import LORA_TARGETS, Sd3Family
from drl_family_sd3.plugin import drl_claim_checkpoint


def record(tokens: int = 3, value: float = 1.0) -> ConditionRecord:
    return ConditionRecord(
        tensors={
            "encoder_hidden_states": torch.full((tokens, 32), value),
            "pooled_projections": torch.full((32,), value),
        }
    )


def test_records_come_with_or_without_batch_axis(family: Sd3Family) -> None:
    plain = record()
    batched = ConditionRecord(tensors={k: v[None] for k, v in plain.tensors.items()})
    for name, tensor in family.condition(plain).arguments.items():
        assert tensor.shape[0] == 1
        assert torch.equal(tensor, family.condition(batched).arguments[name])


def test_a_record_without_pooled_text_is_refused(family: Sd3Family) -> None:
    lacking = ConditionRecord(tensors={"encoder_hidden_states": torch.zeros(3, 32)})
    with pytest.raises(ContractError, match="the engine sent encoder_hidden_states"):
        family.condition(lacking)


def test_a_record_of_two_rows_is_refused(family: Sd3Family) -> None:
    double = ConditionRecord(tensors={k: v.repeat(2, 1, 1) for k, v in record().tensors.items()})
    with pytest.raises(ContractError, match="rank 2"):
        family.condition(double)


def test_collating_keeps_the_order_of_rows(family: Sd3Family) -> None:
    joined = family.collate([family.condition(record(value=v)) for v in (1.0, 2.0, 3.0)])
    assert joined.rows == 3
    assert joined.arguments["pooled_projections"][:, 0].tolist() == [1.0, 2.0, 3.0]


def test_two_text_lengths_in_one_batch_are_refused(family: Sd3Family) -> None:
    rows = [family.condition(record(tokens)) for tokens in (3, 4)]
    with pytest.raises(ContractError, match=r"\[3, 4\] text tokens"):
        family.collate(rows)


def test_time_is_the_recorded_timestep_else_a_thousand_sigma(family: Sd3Family) -> None:
    sigma_B = torch.tensor([1.0, 0.25])
    assert family.model_time(sigma_B, None).tolist() == [1000.0, 250.0]
    recorded = torch.tensor([999.0, 251.0])
    assert family.model_time(sigma_B, recorded) is recorded


def test_guidance_by_hand(family: Sd3Family) -> None:
    p, u = {"visual": torch.tensor([3.0])}, {"visual": torch.tensor([1.0])}
    assert family.guide(p, u, Guidance(scale=4.5))["visual"].tolist() == [1 + 4.5 * 2]


def test_the_true_scale_plays_no_part(family: Sd3Family) -> None:
    p, u = {"visual": torch.tensor([3.0])}, {"visual": torch.tensor([1.0])}
    assert family.guide(p, u, Guidance(scale=1.0, true_scale=9.0))["visual"].tolist() == [3.0]


def test_the_forward_is_the_model_of_diffusers(family: Sd3Family, checkpoint: str) -> None:
    model = family.build("transformer", WeightSource(checkpoint=checkpoint))
    stock = SD3Transformer2DModel.from_pretrained(checkpoint, subfolder="transformer").eval()
    latents, time_B = torch.randn(2, 4, 8, 8, generator=generator()), torch.tensor([900.0, 20.0])
    condition = family.collate([family.condition(record(value=v)) for v in (0.1, 0.2)])
    with torch.no_grad():
        ours = family.forward(model, {"visual": latents}, time_B, condition)["visual"]
        theirs = stock(latents, timestep=time_B, **condition.arguments).sample
    assert torch.equal(ours, theirs)


def generator() -> torch.Generator:
    return torch.Generator().manual_seed(0)


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_the_position_table_stays_float32(family: Sd3Family, checkpoint: str, dtype: str) -> None:
    exact = family.build("transformer", WeightSource(checkpoint=checkpoint)).state_dict()
    low = family.build("transformer", WeightSource(checkpoint=checkpoint, dtype=dtype)).state_dict()
    table = "pos_embed.pos_embed"
    assert torch.equal(low[table], exact[table])
    assert {str(v.dtype) for k, v in low.items() if k != table} == {
        {"bf16": "torch.bfloat16", "fp16": "torch.float16"}[dtype]
    }


def test_another_component_is_refused(family: Sd3Family, checkpoint: str) -> None:
    with pytest.raises(BadInput, match="no trainable component 'vae'"):
        family.build("vae", WeightSource(checkpoint=checkpoint))


def test_lora_targets_leave_the_second_attention_alone(family: Sd3Family, tmp_path: Path) -> None:
    model = SD3Transformer2DModel.from_config(tiny_config(dual_attention_layers=[0]))
    matched = [
        name
        for name, module in model.named_modules()
        if isinstance(module, torch.nn.Linear) and name.endswith(LORA_TARGETS)
    ]
    assert len(matched) == 8 + 7  # the last block has no attn.to_add_out
    assert not [name for name in matched if "attn2" in name]


def tiny_config(**changes: Any) -> dict[str, Any]:
    return {
        "sample_size": 8,
        "patch_size": 2,
        "in_channels": 4,
        "out_channels": 4,
        "num_layers": 2,
        "attention_head_dim": 16,
        "num_attention_heads": 2,
        "joint_attention_dim": 24,
        "caption_projection_dim": 32,
        "pooled_projection_dim": 20,
        "pos_embed_max_size": 16,
        "qk_norm": "rms_norm",
        "dual_attention_layers": [],
    } | changes


@pytest.mark.parametrize("dual", [[], [0], [0, 1]])
@pytest.mark.parametrize(("height", "width", "tokens"), [(8, 8, 3), (4, 12, 7)])
def test_work_is_what_torch_counts(
    family: Sd3Family, dual: list[int], height: int, width: int, tokens: int
) -> None:
    config = tiny_config(dual_attention_layers=dual)
    model = SD3Transformer2DModel.from_config(config)
    counter = FlopCounterMode(display=False)
    with counter, sdpa_kernel(SDPBackend.MATH):  # the fused CPU kernel is not counted
        model(
            torch.randn(1, 4, height, width),
            timestep=torch.ones(1),
            encoder_hidden_states=torch.randn(1, tokens, 24),
            pooled_projections=torch.randn(1, 20),
        )
    shape = RowShape(latent=(4, height, width), text_tokens=tokens)
    work = family.flops("transformer", json.loads(json.dumps(config)), shape)
    assert work is not None
    assert work.forward == counter.get_total_flops()
    assert work.backward == 2 * work.forward


def recipe(checkpoint: str, **sampling: Any) -> Any:
    asked = {"height": 32, "width": 32, "num_frames": 1, "true_cfg_scale": None} | sampling
    return SimpleNamespace(
        model=SimpleNamespace(checkpoint=checkpoint), sampling=SimpleNamespace(**asked)
    )


def test_a_recipe_that_fits_has_no_problems(family: Sd3Family, checkpoint: str) -> None:
    assert list(family.check(recipe(checkpoint))) == []


def test_all_problems_of_a_recipe_come_at_once(family: Sd3Family, checkpoint: str) -> None:
    bad = recipe(checkpoint, height=30, width=128, num_frames=9, true_cfg_scale=4.0)
    assert [problem.path for problem in family.check(bad)] == [
        "sampling.height",
        "sampling.width",
        "sampling.num_frames",
        "sampling.true_cfg_scale",
    ]


def test_a_checkpoint_is_claimed_by_its_class() -> None:
    facts = CheckpointFacts(
        reference="./mine", model_index={"_class_name": "StableDiffusion3Pipeline"}
    )
    claim = drl_claim_checkpoint(checkpoint=facts)
    assert claim is not None
    assert (claim.family, claim.by) == ("sd3", "class")


@pytest.mark.parametrize(
    ("reference", "pattern"),
    [
        ("stabilityai/Stable-Diffusion-3.5-medium", "stable-diffusion-3"),
        ("me/tiny-SD3", "sd3"),
        ("black-forest-labs/FLUX.1-dev", None),
        ("stabilityai/stable-diffusion-xl", None),
    ],
)
def test_a_checkpoint_is_claimed_by_its_name(reference: str, pattern: str | None) -> None:
    claim = drl_claim_checkpoint(checkpoint=CheckpointFacts(reference=reference))
    assert (None if claim is None else claim.pattern) == pattern

"""Recipes that the field trains with: accepted as they are, with the batch arithmetic that they report."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from drl.catalog import Catalog
from drl.config import load_recipe
from drl.config.machine import Machine
from drl.stages.pairs import BatchPlan, batch_plan

TEXT = """
[model]
checkpoint = "stabilityai/stable-diffusion-3.5-medium"
[lora]
enabled = true
rank = 32
alpha = 64
[data]
prompt_data = "prompts.jsonl"
[reward]
type = "ocr"
"""
GRPO_OF_SD3 = """
sampling.num_steps=10
sampling.guidance_scale=4.5
sde.noise_level=0.7
sde.step_strategy=sde_window
sde.num_steps=10
sde.sde_window.range=[0,10]
algorithm.kl_beta=0.04
algorithm.policy_loss.clip_range=1e-4
algorithm.grpo.globalize_std=true
rollout.batch_size=16
rollout.n_samples_per_prompt=16
rollout.microgroup_size=8
train.global_batch_size=64
train.num_rollout=600
cluster.actor_num_gpus_per_node=2
"""
NFT_OF_SD3 = """
algorithm.loss=nft
algorithm.nft.beta=1.0
algorithm.nft.timestep_fraction=0.99
sde.type=ode
sde.noise_level=0.0
sampling.num_steps=10
sampling.guidance_scale=1.0
ema.enabled=true
ema.rollout_policy=ema
rollout.batch_size=8
rollout.n_samples_per_prompt=8
train.num_rollout=300
optimizer.lr=3e-4
optimizer.weight_decay=1e-4
eval.num_steps=50
cluster.actor_num_gpus_per_node=2
"""
TILED_OF_QWEN = """
sampling.num_steps=10
sde.step_strategy=sde_window
sde.num_steps=2
sde.sde_window.range=[3,5]
algorithm.grpo.globalize_std=true
rollout.batch_size=32
rollout.n_samples_per_prompt=16
train.num_steps_per_rollout=2
train.micro_batch_size_sample=8
train.micro_batch_size_tstep=1
train.num_rollout=100
cluster.actor_num_gpus_per_node=4
"""
CHOICE_OF_WAN = """
sampling.num_steps=10
sde.noise_level=0.9
sde.step_strategy=epoch_global_random_choice
sde.num_steps=1
sde.epoch_global_random_choice.candidate_steps=[1,2,3]
rollout.batch_size=48
rollout.n_samples_per_prompt=16
train.num_steps_per_rollout=2
train.micro_batch_size=2
train.num_rollout=100
cluster.actor_num_gpus_per_node=4
"""
CPS_OF_LTX = """
sampling.num_steps=24
sampling.guidance_scale=1.0
sde.type=cps
sde.step_strategy=epoch_global_random_choice
sde.num_steps=3
sde.epoch_global_random_choice.candidate_steps=[0,1,2,3,4,5,6,7,8,9]
algorithm.policy_loss.clip_range=1e-5
rollout.batch_size=8
rollout.n_samples_per_prompt=8
rollout.microgroup_size=1
train.num_rollout=100
"""
LATE_AVERAGE_OF_H3 = """
algorithm.loss=nft
algorithm.nft.beta=0.1
algorithm.nft.timestep_fraction=1.0
sde.type=ode
sampling.num_steps=8
sampling.guidance_scale=1.0
ema.enabled=true
ema.rollout_policy=ema
ema.decay_init=0.0
ema.decay_ramp=0.0075
ema.decay_max=0.999
ema.decay_flat_steps=75
rollout.batch_size=4
rollout.n_samples_per_prompt=16
train.num_rollout=100
"""


@pytest.fixture(scope="module")
def catalog() -> Catalog:
    return Catalog.load()


def resolved(folder: Path, catalog: Catalog, sets: str) -> Any:
    (folder / "prompts.jsonl").write_text('{"input": "a sign that says \\\\"OPEN\\\\""}\n')
    file = folder / "recipe.toml"
    file.write_text(TEXT)
    return load_recipe(file, sets=sets.split(), catalog=catalog, machine=Machine(cuda=True))


def per_rank(plan: BatchPlan) -> tuple[int, int]:
    """Pairs of one rank in a whole rollout, and in one optimizer step."""
    step = plan.pairs_per_step // plan.ranks
    return step * plan.optimizer_steps, step


@pytest.mark.parametrize(
    ("sets", "samples", "steps", "pairs", "of_rank", "forwards"),
    [
        (GRPO_OF_SD3, 256, 4, 640, (1280, 320), 320),
        (NFT_OF_SD3, 64, 1, 576, (288, 288), 288),
        (TILED_OF_QWEN, 512, 2, 512, (256, 128), 16),
        (CHOICE_OF_WAN, 768, 2, 384, (192, 96), 48),
        (CPS_OF_LTX, 64, 1, 192, (192, 192), 192),
        (LATE_AVERAGE_OF_H3, 64, 1, 512, (512, 512), 512),
    ],
    ids=["sd3 grpo", "sd3 nft", "qwen grpo", "wan grpo", "ltx grpo", "h3 nft"],
)
def test_the_arithmetic_is_the_one_reported(
    tmp_path: Path,
    catalog: Catalog,
    sets: str,
    samples: int,
    steps: int,
    pairs: int,
    of_rank: tuple[int, int],
    forwards: int,
) -> None:
    plan = batch_plan(resolved(tmp_path, catalog, sets))
    assert (plan.samples, plan.optimizer_steps, plan.pairs_per_step) == (samples, steps, pairs)
    assert per_rank(plan) == of_rank
    assert (plan.micro_batches, plan.filler) == (forwards, 0)


@pytest.mark.parametrize(
    ("sets", "mode", "warned"),
    [
        (GRPO_OF_SD3, "lora_base", set()),
        (NFT_OF_SD3, "ema", set()),
        (TILED_OF_QWEN, "none", set()),
        (CHOICE_OF_WAN, "none", set()),
        (CPS_OF_LTX, "none", set()),
        # equal weights in the first 75 rollouts: that loss learns nothing there
        (LATE_AVERAGE_OF_H3, "ema", {"ema.decay_init"}),
    ],
    ids=["sd3 grpo", "sd3 nft", "qwen grpo", "wan grpo", "ltx grpo", "h3 nft"],
)
def test_nothing_is_said_of_what_is_known_to_work(
    tmp_path: Path, catalog: Catalog, sets: str, mode: str, warned: set[str]
) -> None:
    recipe = resolved(tmp_path, catalog, sets)
    assert recipe.algorithm.ref_mode == mode
    assert {problem.path for problem in recipe.warnings} == warned

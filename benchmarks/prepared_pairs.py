"""Recipe, configs and samples of a Flow-GRPO training without an engine: what a rollout would have left."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from common import ALPHA, Scale
from torch import Tensor

from drl.api import VISUAL, ConditionRecord, Prompt, Sample, Trajectory

NAME = "transformer"
GROUP = 8
"""Samples of a prompt: they share their condition records."""

RECIPE = """
[model]
checkpoint = "{checkpoint}"
family = "sd3"
gradient_checkpointing = {checkpointing}

[lora]
enabled = true
rank = {rank}
alpha = {alpha}

[cluster]
device = "{device}"

[data]
prompt_data = "prompts.jsonl"

[sampling]
num_steps = 10
width = {side}
height = {side}
guidance_scale = 1.0

[rollout]
batch_size = {rows}
n_samples_per_prompt = 8

[sde]
type = "sde"
step_strategy = "sde_window"
num_steps = 2

[sde.sde_window]
range = [0, 5]

[reward]
type = "jpeg"

[train]
num_rollout = 1
micro_batch_size = {rows}
forward_dtype = "{dtype}"
compile = {compile}

[optimizer]
lr = 1e-9

[algorithm.policy_loss]
clip_range = 0.9
"""


def write_recipe(
    size: Scale, folder: Path, *, device: str, compiled: bool, checkpointing: bool
) -> Path:
    """Write a recipe, and of its checkpoint the configs alone: the weights are made on the device."""
    config = {"_class_name": "SD3Transformer2DModel", **size.transformer}
    config |= {"patch_size": 2, "in_channels": 16, "out_channels": 16, "qk_norm": "rms_norm"}
    (folder / NAME).mkdir(parents=True)
    (folder / NAME / "config.json").write_text(json.dumps(config))
    index = {"_class_name": "StableDiffusion3Pipeline"}
    (folder / "model_index.json").write_text(json.dumps(index))
    (folder / "prompts.jsonl").write_text('{"input": "a sign"}\n')
    recipe = folder / "training_loop.toml"
    recipe.write_text(
        RECIPE.format(
            checkpoint=folder,
            device=device,
            rank=size.rank,
            alpha=ALPHA,
            side=8 * size.side,
            rows=size.batch,
            dtype="bf16" if device.startswith("cuda") else "fp32",
            compile=str(compiled).lower(),
            checkpointing=str(checkpointing).lower(),
        )
    )
    return recipe


def samples_of(size: Scale, count: int, home: str) -> list[Sample]:
    """Return samples with two recorded steps each; those of a prompt share their conditions."""
    generator = torch.Generator().manual_seed(0)

    def drawn(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator).to(home)

    def record() -> ConditionRecord:
        return ConditionRecord(
            tensors={
                "encoder_hidden_states": drawn(
                    size.tokens, size.transformer["joint_attention_dim"]
                ),
                "pooled_projections": drawn(size.transformer["pooled_projection_dim"]),
            }
        )

    sigmas = torch.linspace(1.0, 0.0, 11)
    negative = record()
    conditions = [record() for _ in range(-(-count // GROUP))]
    return [
        Sample(
            index=index,
            group_index=index // GROUP,
            member=index % GROUP,
            prompt=Prompt(row=0, text=""),
            seed=index,
            trajectory=Trajectory(
                latents={VISUAL: drawn(3, 16, size.side, size.side)},
                latent_steps=(1, 2, 3),
                sigmas=sigmas,
                timesteps=1000 * sigmas[:-1],
                log_probs=torch.zeros(10),
                sde_steps=(1, 2),
            ),
            condition=conditions[index // GROUP],
            negative=negative,
            reward=0.0,
        )
        for index in range(count)
    ]

"""Sections about generation and data: rollout, sampling, sde, data, eval."""

from __future__ import annotations

from typing import Annotated

from pydantic import AfterValidator

from drl.config.fields import MAX_SEED, ComponentName, InputFile, Section
from drl.options import Field, Options


class RolloutSection(Section):
    """How many samples an iteration makes, and who makes them."""

    engine: ComponentName = Field("local", description="What turns prompts into samples.")
    batch_size: int = Field(gt=0, description="Prompts per rollout.")
    n_samples_per_prompt: int = Field(
        1, gt=0, description="Samples per prompt: the group that advantages compare within."
    )
    microgroup_size: int = Field(
        1, gt=0, description="Samples of one prompt in one engine request."
    )
    seed: int | None = Field(
        None, ge=0, le=MAX_SEED, description="Seed of the samples; train.seed when unset."
    )
    max_draws: int = Field(
        8, gt=0, description="Batches of prompts drawn at most to fill one rollout."
    )
    shared_start: bool = Field(
        False, description="Samples of a group share their initial latents, not their step noise."
    )


class SamplingSection(Section):
    """Settings of one generation."""

    num_steps: int = Field(10, gt=0, le=10_000, description="Denoising steps.")
    flow_shift: float | None = Field(
        None, gt=0, description="Shift of the engine's sigma table; the checkpoint's when unset."
    )
    guidance_scale: float = Field(
        4.0, ge=0, description="Classifier-free guidance; on above 1, so 1 runs without."
    )
    true_cfg_scale: float | None = Field(
        None, ge=0, description="Guidance scale that wins over guidance_scale where set."
    )
    negative_prompt: str | None = Field(
        None, description="Negative prompt of guidance; the model's own when unset."
    )
    height: int = Field(512, gt=0, le=65_536, description="Height of the output in pixels.")
    width: int = Field(512, gt=0, le=65_536, description="Width of the output in pixels.")
    num_frames: int = Field(1, gt=0, description="Frames of the output; 1 is an image.")
    generator_device: str = Field(
        "cuda",
        pattern=r"^(cpu|cuda)$",
        description="Device of the engine's noise generators; cpu where there is no GPU.",
    )


class SdeSection(Section):
    """The stochastic steps of the rollout."""

    type: ComponentName = Field(
        "sde", description="Mathematics of a denoising step, in the engine and in the trainer."
    )
    noise_level: float = Field(0.7, ge=0, description="Noise added by a stochastic step (eta).")
    num_steps: int = Field(
        0, ge=0, description="Stochastic steps per sample that become training pairs."
    )
    step_strategy: ComponentName | None = Field(
        None, description="Which steps are stochastic; the first sde.num_steps when unset."
    )
    log_prob_no_const: bool = Field(
        False, description="Leave the constants out of the log-probability; cps needs it."
    )


class DataSection(Section):
    """Where prompts come from."""

    source: ComponentName = Field("jsonl", description="Data source.")
    prompt_data: InputFile | None = Field(None, description="File of prompts, one row per prompt.")
    input_key: str = Field("input", min_length=1, description="Field of a row with the prompt.")
    metadata_key: str = Field(
        "metadata", min_length=1, description="Field of a row with the metadata of the prompt."
    )


class EvalDataset(Options):
    """One held-out set of prompts."""

    name: str = Field(
        pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$", description="Name of the set in metrics."
    )
    path: InputFile = Field(description="File of prompts, one row per prompt.")


def distinct_names(datasets: tuple[EvalDataset, ...]) -> tuple[EvalDataset, ...]:
    """Refuse two sets of one name with a ValueError."""
    names = [dataset.name for dataset in datasets]
    for name in names:
        if names.count(name) > 1:
            raise ValueError(f"has two sets named {name!r}")
    return datasets


class EvalSection(Section):
    """Evaluation on held-out prompts."""

    interval: int | None = Field(
        None, ge=0, description="Iterations between evaluations; 0 or unset: none in between."
    )
    datasets: Annotated[tuple[EvalDataset, ...], AfterValidator(distinct_names)] = Field(
        (), description="Held-out sets: a list of {name, path}."
    )
    n_samples_per_prompt: int = Field(1, gt=0, description="Samples per held-out prompt.")
    num_steps: int | None = Field(
        None, gt=0, le=10_000, description="Denoising steps; sampling.num_steps when unset."
    )
    before_train: bool = Field(True, description="Evaluate before the first iteration.")
    after_train: bool = Field(True, description="Evaluate after the last iteration.")
    input_key: str | None = Field(
        None, min_length=1, description="Field with the prompt; data.input_key when unset."
    )
    seed: int = Field(
        42, ge=0, le=MAX_SEED, description="Seed of the evaluation's noise; no other seed moves it."
    )
    rollout_sampler: bool = Field(
        False, description="Evaluate under the rollout's own noisy sampler as well."
    )

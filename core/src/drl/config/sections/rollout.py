"""Sections about generation and data: rollout, sampling, sde, data, eval."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import AfterValidator

from drl.config.fields import (
    MAX_SEED,
    ComponentName,
    FunctionName,
    InputFile,
    Names,
    PlainName,
    Section,
)
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
    over_sampling_batch_size: int | None = Field(
        None,
        gt=0,
        description="Prompts drawn at once, rollout.batch_size or more; the first complete groups are "
        "kept. When unset a batch, and then just what filters dropped.",
    )
    max_draws: int = Field(
        8, gt=0, description="Batches of prompts drawn at most to fill one rollout."
    )
    server_concurrency: int = Field(
        512, gt=0, description="Requests in flight at most, per engine; others wait."
    )
    use_router: bool | None = Field(
        None,
        description="Requests go through drl's router; true for a served engine, the only way there is.",
    )
    router_timeout: float | None = Field(
        None, gt=0, description="Seconds that the router waits for an answer; no limit when unset."
    )
    router_max_connections: int | None = Field(
        None,
        gt=0,
        description="Connections of the router at most; rollout.server_concurrency times the number of "
        "engines when unset.",
    )
    router_failure_threshold: int | None = Field(
        None,
        gt=0,
        description="Failed health checks in a row after which the router leaves an engine out; 3 for a "
        "served engine when unset.",
    )
    distributed_post: bool | None = Field(
        None,
        description="Requests are posted by processes on every node; false for a served engine when unset.",
    )
    parser_num_workers: int | None = Field(
        None,
        gt=0,
        description="Workers that read answers of the engine; 1 for a served engine when unset.",
    )
    patch_groups: Names | None = Field(
        None, description="Groups of patches by which a served engine computes as the trainer does."
    )
    shared_start: bool = Field(
        False, description="Samples of a group share their initial latents, not their step noise."
    )
    function: FunctionName | None = Field(
        None, description="Function that makes a whole rollout, instead of drl's own way."
    )
    custom_generate: FunctionName | None = Field(
        None, description="Function that makes the samples of a request, instead of the engine."
    )
    dynamic_sampling_filter: FunctionName | None = Field(
        None, description="Function that keeps a scored group, or has another one drawn."
    )
    sample_filter: FunctionName | None = Field(
        None, description="Function that takes single samples out of the loss."
    )
    buffer_filter: FunctionName | None = Field(
        None, description="Function that chooses the groups that leave the data source's buffer."
    )
    custom_convert: FunctionName | None = Field(
        None, description="Function that turns samples into training pairs, advantages included."
    )
    custom_expand: FunctionName | None = Field(
        None, description="Function that turns samples with their advantages into training pairs."
    )
    custom_log: FunctionName | None = Field(
        None, description="Function that sees a rollout's samples before its figures are logged."
    )
    custom_eval_log: FunctionName | None = Field(
        None, description="Function that sees an evaluation's samples before it is logged."
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
    guidance_scale_2: float | None = Field(
        None, ge=0, description="Guidance of a model's second expert, such as low-noise steps."
    )
    true_cfg_scale: float | None = Field(
        None, ge=0, description="Guidance scale that wins over guidance_scale where set."
    )
    negative_prompt: str | None = Field(
        None, description="Negative prompt of guidance; the model's own when unset."
    )
    batched_guidance: bool = Field(
        False,
        description="Predict with and without prompt in one forward of twice the rows, in engine and "
        "trainer; true on a GPU unless set.",
    )
    height: int = Field(512, gt=0, le=65_536, description="Height of the output in pixels.")
    width: int = Field(512, gt=0, le=65_536, description="Width of the output in pixels.")
    num_frames: int = Field(1, gt=0, description="Frames of the output; 1 is an image.")
    fps: float | None = Field(
        None, gt=0, description="Frames per second of a video; the model's own when unset."
    )
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
    backend: ComponentName | None = Field(
        None, description="Mathematics of a step in the trainer alone; sde.type when unset."
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
    on_broken_row: Literal["refuse", "skip"] = Field(
        "refuse",
        description="Rows that cannot be used (no JSON, unreadable media, too few frames): refuse lists "
        "them and ends the run, skip leaves them out and counts them.",
    )
    sft_encoder_checkpoint: str | None = Field(
        None,
        min_length=1,
        description="Pipeline whose text encoders and VAE encode the data; model.checkpoint when unset.",
    )
    sft_frame_stride: int = Field(
        1, gt=0, description="Every how many-th frame of a video is used."
    )
    sft_cache: InputFile | None = Field(
        None,
        description="Folder of the encoded data; .sft_cache in the folder of the data when unset.",
    )
    sft_workers: int = Field(
        0,
        ge=0,
        le=256,
        description="Processes that encode media, each with its own encoders; 0: the run's process.",
    )
    global_dataset: bool = Field(
        True, description="false: no prompts are read; rollout.function finds its own data."
    )


def without_null(values: Any) -> Any:
    """Refuse null inside a table, which no recipe file can hold, with a ValueError."""
    inner = values.values() if isinstance(values, dict) else values
    for value in inner if isinstance(values, (dict, list)) else ():
        if value is None:
            raise ValueError("must not hold null; leave the key out")
        without_null(value)
    return values


class EvalDataset(Options):
    """One held-out set of prompts."""

    name: str = Field(
        pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$", description="Name of the set in metrics."
    )
    path: InputFile = Field(description="File of prompts, one row per prompt.")
    input_key: str | None = Field(
        None, min_length=1, description="Field with the prompt; eval.input_key when unset."
    )
    metadata_key: str | None = Field(
        None, min_length=1, description="Field with the metadata; data.metadata_key when unset."
    )
    n_samples_per_prompt: int | None = Field(
        None, gt=0, description="Samples per prompt; eval.n_samples_per_prompt when unset."
    )
    rm_type: PlainName | None = Field(
        None, description="Reward that scores this set, instead of that of the training."
    )
    metadata_overrides: Annotated[dict[str, Any], AfterValidator(without_null)] = Field(
        {}, description="Merged into the metadata of every row of the set."
    )


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
    config: InputFile | None = Field(
        None, description="YAML or JSON file of held-out sets; wins over eval.datasets."
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
    reward_key: str | None = Field(
        None, min_length=1, description="Part of the score that counts; reward.key when unset."
    )
    seed: int = Field(
        42, ge=0, le=MAX_SEED, description="Seed of the evaluation's noise; no other seed moves it."
    )
    rollout_sampler: bool = Field(
        False, description="Evaluate under the rollout's own noisy sampler as well."
    )
    function: FunctionName | None = Field(
        None, description="Function that evaluates; rollout.function when unset."
    )

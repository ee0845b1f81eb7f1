"""Sections about the trainer: train, optimizer, ema."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import AfterValidator, BeforeValidator

from drl.config.environment import environment
from drl.config.fields import MAX_SEED, Section, pairs
from drl.options import Field


class TrainSection(Section):
    """Precision, batch sizes and length of the training."""

    forward_dtype: Literal["fp32", "bf16", "fp16"] = Field(
        "bf16", description="Precision of the model's forward pass; fp32 on a CPU unless set."
    )
    master_dtype: Literal["fp32", "bf16", "fp16"] = Field(
        "fp32", description="Precision of the trained weights and the optimizer's state."
    )
    reduce_dtype: Literal["fp32", "bf16", "fp16"] = Field(
        "fp32", description="Precision in which ranks add their gradients up."
    )
    parameter_dtypes: Annotated[
        tuple[tuple[str, Literal["fp32", "bf16", "fp16"]], ...], BeforeValidator(pairs)
    ] = Field(
        (),
        description="Precision of single modules in the forward pass: pairs of a glob over parameter names "
        "and a dtype; a later glob wins over an earlier one, and all over the family's.",
    )
    compile: bool = Field(
        False, description="Compile the model's blocks with torch.compile, for fixed shapes."
    )
    attention_backend: str | None = Field(
        None,
        min_length=1,
        description="Attention kernel, by its name in diffusers, in trainer and engine; torch's own choice "
        "when unset.",
    )
    deterministic: bool = Field(
        False, description="Only kernels that give the same bits every time; errors for others."
    )
    dp_replicate_size: int = Field(
        1,
        gt=0,
        description="Copies of the sharded weights; each is spread over ranks / copies ranks.",
    )
    shard_frozen: Literal["auto", "always", "never"] = Field(
        "auto",
        description="Spread the frozen base under adapters over ranks; auto: unless it takes less than a "
        "quarter of a GPU's memory.",
    )
    cpu_offload: bool = Field(
        False, description="Keep sharded weights and their optimizer on the CPU between forwards."
    )
    cpu_backend: Literal["gloo"] = Field(
        "gloo", description="What carries the ranks' messages between CPUs."
    )
    seed: int = Field(1234, ge=0, le=MAX_SEED, description="Seed of the run.")
    global_batch_size: int | None = Field(
        None, gt=0, description="Samples per optimizer step; derived when unset."
    )
    num_steps_per_rollout: int | None = Field(
        None, gt=0, description="Optimizer steps per rollout; derived when unset, else 1."
    )
    micro_batch_size: int = Field(1, gt=0, description="Pairs per forward pass.")
    micro_batch_size_sample: int | None = Field(
        None,
        gt=0,
        description="Samples per forward pass, times micro_batch_size_tstep steps of each.",
    )
    micro_batch_size_tstep: int | None = Field(
        None, gt=0, description="Trained steps of each sample in a forward pass."
    )
    iter_order: Literal["sample_major", "timestep_major"] = Field(
        "sample_major",
        description="Which tile is next: sample_major sees all samples before the next steps.",
    )
    dp_split_mode: Literal["contiguous", "stride"] = Field(
        "contiguous", description="Ranks train on neighbouring samples, or on every n-th."
    )
    num_rollout: int | None = Field(
        None, ge=0, description="Iterations of the run; 0 evaluates once and ends."
    )
    num_epoch: int | None = Field(
        None, gt=0, description="Length in passes over the data, where num_rollout is unset."
    )
    start_rollout_id: int | None = Field(
        None, ge=0, description="First iteration; that of checkpoint.load, or 0, when unset."
    )
    env: Annotated[dict[str, str], AfterValidator(environment)] = Field(
        {}, description="Environment variables of the training processes."
    )
    train_only: bool = Field(
        False, description="No engine, no sync, no evaluation: supervised training."
    )


class OptimizerSection(Section):
    """What steps the weights, and the schedule of its learning rate."""

    name: Literal["adam", "sgd"] = Field(
        "adam", description="adam: AdamW. sgd: gradient descent with momentum."
    )
    lr: float = Field(1e-6, ge=0, description="Peak learning rate.")
    beta1: float = Field(0.9, ge=0, lt=1, description="Decay of the first moment.")
    beta2: float = Field(0.999, ge=0, lt=1, description="Decay of the second moment.")
    eps: float = Field(1e-8, gt=0, description="Added to the root of the second moment.")
    momentum: float = Field(0.9, ge=0, lt=1, description="Momentum of sgd.")
    weight_decay: float = Field(
        0.0, ge=0, description="Weight decay of every trained parameter; decoupled in adam."
    )
    clip_grad: float = Field(1.0, gt=0, description="Limit of the gradient's global norm.")
    lr_decay_style: Literal["constant", "linear", "cosine", "inverse-square-root", "WSD"] = Field(
        "constant", description="How the learning rate falls after the warm-up."
    )
    min_lr: float = Field(0.0, ge=0, description="The learning rate never falls below this.")
    lr_warmup_init: float = Field(0.0, ge=0, description="Learning rate of the first warm-up step.")
    lr_warmup_iters: int = Field(0, ge=0, description="Optimizer steps of linear warm-up.")
    lr_warmup_fraction: float | None = Field(
        None, ge=0, lt=1, description="Warm-up as a share of lr_decay_iters; wins over iters."
    )
    lr_decay_iters: int | None = Field(
        None, gt=0, description="Optimizer step at which the decay ends; the run's last when unset."
    )
    lr_wsd_decay_iters: int | None = Field(
        None, gt=0, description="Length of WSD's final decay, in optimizer steps."
    )
    lr_wsd_decay_style: Literal["linear", "cosine", "exponential", "minus_sqrt"] | None = Field(
        None, description="Shape of WSD's final decay."
    )
    use_checkpoint_lr_scheduler: bool = Field(
        True, description="checkpoint.load takes the schedule's settings from the checkpoint."
    )
    override_lr_scheduler: bool = Field(
        False, description="checkpoint.load leaves the schedule's settings to the recipe."
    )


class EmaSection(Section):
    """A moving average of the trained weights, the "old policy"; updated once per iteration."""

    enabled: bool = Field(False, description="Keep a moving average of the trained weights.")
    rollout_policy: Literal["live", "ema"] = Field(
        "live", description="Weights that engines get: the trained ones, or their average."
    )
    decay_init: float = Field(
        0.001, ge=0, le=1, description="Share of the average that the first updates keep."
    )
    decay_ramp: float = Field(
        0.001, ge=0, description="Growth of that share per update after them, from 0."
    )
    decay_max: float = Field(0.5, ge=0, le=1, description="That share grows up to this.")
    decay_flat_steps: int = Field(
        0, ge=0, description="Updates that keep decay_init; with 0 it is never used."
    )

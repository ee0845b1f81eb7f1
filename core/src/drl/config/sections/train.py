"""Sections about the trainer: train, optimizer."""

from __future__ import annotations

from typing import Literal

from drl.config.fields import MAX_SEED, Section
from drl.options import Field


class TrainSection(Section):
    """Precision, batch sizes and length of the training."""

    forward_dtype: Literal["fp32", "bf16", "fp16"] = Field(
        "bf16", description="Precision of the model's forward pass; fp32 on a CPU unless set."
    )
    master_dtype: Literal["fp32"] = Field(
        "fp32",
        description="Precision of the trained weights and the optimizer's state.",
        json_schema_extra={"later": ["bf16", "fp16"]},
    )
    seed: int = Field(1234, ge=0, le=MAX_SEED, description="Seed of the run.")
    global_batch_size: int | None = Field(
        None, gt=0, description="Samples per optimizer step; derived when unset."
    )
    num_steps_per_rollout: int | None = Field(
        None, gt=0, description="Optimizer steps per rollout; derived when unset, else 1."
    )
    micro_batch_size: int = Field(1, gt=0, description="Pairs per forward pass.")
    num_rollout: int | None = Field(
        None, ge=0, description="Iterations of the run; 0 evaluates once and ends."
    )
    train_only: bool = Field(
        False, description="No engine, no sync, no evaluation: supervised training."
    )


class OptimizerSection(Section):
    """AdamW and the schedule of its learning rate."""

    name: Literal["adam"] = Field("adam", description="adam: AdamW.")
    lr: float = Field(1e-6, ge=0, description="Peak learning rate.")
    beta1: float = Field(0.9, ge=0, lt=1, description="Decay of the first moment.")
    beta2: float = Field(0.999, ge=0, lt=1, description="Decay of the second moment.")
    eps: float = Field(1e-8, gt=0, description="Added to the root of the second moment.")
    weight_decay: float = Field(0.0, ge=0, description="Decoupled weight decay.")
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

"""Build the trained components: weights, adapters, what is frozen; and their optimizer."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any

import torch

from drl.errors import BadInput
from drl.interfaces.family import Family, TrainPipelineConfig, WeightSource
from drl.lora import LoraConfig, inject
from drl.mathematics.schedule import ScheduleSettings
from drl.types import Context

if TYPE_CHECKING:
    from torch import nn


@dataclass(frozen=True, slots=True, kw_only=True)
class Component:
    """One trained component: its module, its family description, its adapter settings (if any)."""

    module: nn.Module
    config: TrainPipelineConfig
    lora: LoraConfig | None


def build_components(recipe: Any, family: Family, context: Context) -> dict[str, Component]:
    """Build every component of ``model.components``, in that order."""
    unknown = [name for name in recipe.model.components if name not in family.components]
    if unknown:
        raise BadInput(
            f"model.components: {type(family).__name__} has no component {unknown}; "
            f"it has {list(family.components)}"
        )
    return {
        name: build_component(recipe, family, context, name, number)
        for number, name in enumerate(recipe.model.components)
    }


def build_component(
    recipe: Any, family: Family, context: Context, name: str, number: int
) -> Component:
    """Load float32 masters, then inject adapters or choose what is trained, then let the family finish."""
    checkpoint = recipe.model.checkpoint
    config = family.pipeline_config(name, family.component_config(name, checkpoint))
    check_dtype(recipe.train.forward_dtype, config)
    source = WeightSource(
        checkpoint=checkpoint, dtype=recipe.train.master_dtype, device=context.device
    )
    module = family.build(name, source)
    lora = None
    if recipe.lora.enabled:
        lora = lora_config(recipe, config)
        inject(module, lora, generator=context.generator("lora_init", number))
    else:
        choose_trainable(name, module, config.trainable)
    family.finish(name, module)
    return Component(module=module.train(), config=config, lora=lora)


def lora_config(recipe: Any, config: TrainPipelineConfig) -> LoraConfig:
    """Return the adapter settings of the recipe; targets default to the family's."""
    targets = recipe.lora.target_modules
    if targets is None:
        targets = config.lora_targets
    return LoraConfig(
        rank=recipe.lora.rank,
        alpha=recipe.lora.alpha,
        target_modules=targets if isinstance(targets, str) else tuple(targets),
        init=recipe.lora.init_weights,
    )


def check_dtype(dtype: str, config: TrainPipelineConfig) -> None:
    """Refuse a forward dtype that cannot train this component."""
    if dtype in config.unsafe_dtypes:
        raise BadInput(
            f"train.forward_dtype = '{dtype}' overflows in this model; use 'bf16' or 'fp32'"
        )
    if dtype == "fp16":
        raise BadInput(
            "train.forward_dtype = 'fp16' loses small gradients without a gradient scaler; "
            "use 'bf16' or 'fp32'"
        )


def choose_trainable(name: str, module: nn.Module, globs: Iterable[str]) -> None:
    """Freeze every parameter that matches none of the family's globs."""
    patterns = tuple(globs)
    chosen = 0
    for parameter_name, parameter in module.named_parameters():
        trained = any(fnmatchcase(parameter_name, pattern) for pattern in patterns)
        parameter.requires_grad_(trained)
        chosen += trained
    if not chosen:
        raise BadInput(f"{name}: none of its parameters matches {list(patterns)}; nothing to train")


def build_optimizer(recipe: Any, modules: Mapping[str, nn.Module]) -> torch.optim.Optimizer:
    """Return AdamW over the trainable parameters of all components."""
    options = recipe.optimizer
    parameters = [p for module in modules.values() for p in module.parameters() if p.requires_grad]
    return torch.optim.AdamW(
        parameters,
        lr=options.lr,
        betas=(options.beta1, options.beta2),
        eps=options.eps,
        weight_decay=options.weight_decay,
    )


def build_schedule(recipe: Any, steps_per_rollout: int) -> ScheduleSettings:
    """Return the learning-rate schedule; its length defaults to all optimizer steps of the run."""
    options = recipe.optimizer
    # a run of 0 iterations only evaluates and never asks for a rate
    iters = options.lr_decay_iters or max(1, recipe.train.num_rollout * steps_per_rollout)
    fraction = options.lr_warmup_fraction
    return ScheduleSettings(
        lr=options.lr,
        decay_iters=iters,
        style=options.lr_decay_style,
        min_lr=options.min_lr,
        warmup=options.lr_warmup_iters if fraction is None else fraction * iters,
        warmup_init=options.lr_warmup_init,
        wsd_decay_iters=options.lr_wsd_decay_iters,
        wsd_decay_style=options.lr_wsd_decay_style,
    )

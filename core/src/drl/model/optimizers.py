"""Optimizers by name, the schedule of their learning rate, and which dtypes can train."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import torch

from drl.config.messages import did_you_mean
from drl.errors import BadInput
from drl.mathematics.schedule import ScheduleSettings

if TYPE_CHECKING:
    from torch import nn

    from drl.interfaces.family import TrainPipelineConfig

Parameters = Sequence["nn.Parameter"]
Builder = Callable[[Any, Parameters], torch.optim.Optimizer]


def adam(options: Any, parameters: Parameters) -> torch.optim.Optimizer:
    """AdamW (arXiv 1711.05101), in one kernel on a GPU; weight decay on every parameter."""
    fused = is_fused(parameters)
    return torch.optim.AdamW(
        parameters,
        lr=options.lr,
        betas=(options.beta1, options.beta2),
        eps=options.eps,
        weight_decay=options.weight_decay,
        fused=fused,
        foreach=not fused,
    )


def sgd(options: Any, parameters: Parameters) -> torch.optim.Optimizer:
    """Stochastic gradient descent with momentum; the reference that is easy to follow by hand."""
    return torch.optim.SGD(
        parameters,
        lr=options.lr,
        momentum=options.momentum,
        weight_decay=options.weight_decay,
        foreach=True,
    )


OPTIMIZERS: Mapping[str, Builder] = MappingProxyType({"adam": adam, "sgd": sgd})
"""What ``optimizer.name`` can say."""


def build_optimizer(recipe: Any, parameters: Mapping[str, nn.Parameter]) -> torch.optim.Optimizer:
    """Return the optimizer of ``optimizer.name`` over the trainable ones of the parameters, by name.

    Raises BadInput for an unknown name, and when nothing is trainable.
    """
    options = recipe.optimizer
    builder = OPTIMIZERS.get(options.name)
    if builder is None:
        raise BadInput(
            f"optimizer.name: there is no optimizer '{options.name}'"
            f"{did_you_mean(options.name, list(OPTIMIZERS))}; there are {', '.join(OPTIMIZERS)}"
        )
    trainable = [p for p in parameters.values() if p.requires_grad]
    if not trainable:
        raise BadInput("no parameter is trainable: the optimizer has nothing to do")
    return builder(options, trainable)


def trainable_parameters(models: Mapping[str, nn.Module]) -> dict[str, nn.Parameter]:
    """Return what is trained by ``component.name``, in a fixed order."""
    return {
        f"{component}.{name}": parameter
        for component, model in models.items()
        for name, parameter in model.named_parameters()
        if parameter.requires_grad
    }


def is_fused(parameters: Sequence[nn.Parameter]) -> bool:
    """True when one kernel can step all parameters: floating point numbers on a GPU."""
    return all(p.device.type == "cuda" and p.is_floating_point() for p in parameters)


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


def check_dtype(dtype: str, config: TrainPipelineConfig) -> None:
    """Refuse a forward dtype that cannot train this component."""
    if dtype in config.unsafe_dtypes:
        raise BadInput(
            f"train.forward_dtype = '{dtype}' overflows in this model; use 'bf16' or 'fp32'"
        )

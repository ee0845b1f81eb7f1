"""Optimizer state by parameter name: ``component.parameter/exp_avg``.

A parameter that never got a gradient has no state. That is right for a component that was never
stepped and for the parameters that a family declares (rl-post-training reference 10.3); everywhere else
it means that something is trained in name only, and is an error.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import nn
from torch.distributed.checkpoint.metadata import Metadata

from drl.checkpoint.restricted import entries
from drl.checkpoint.shards import Shard, shard_of
from drl.errors import CheckpointError

Parameters = Mapping[str, nn.Parameter]
MayMiss = Mapping[str, tuple[str, ...]]
"""Parts of parameter names that get no gradient, by component."""


def state_of(
    optimizer: torch.optim.Optimizer, parameters: Parameters, may_miss: MayMiss
) -> dict[str, Shard]:
    """Return this rank's part of every state tensor; empty when no step was taken.

    Raises CheckpointError for parameters without state that the family does not declare.
    """
    shards = {
        f"{name}/{key}": shard_of(value)
        for name, parameter in parameters.items()
        for key, value in tensors_of(optimizer, name, parameter).items()
    }
    check_missing(shards, parameters, may_miss)
    return shards


def tensors_of(
    optimizer: torch.optim.Optimizer, name: str, parameter: nn.Parameter
) -> dict[str, torch.Tensor]:
    """Return the state of one parameter; CheckpointError for a value that is no tensor."""
    state = {k: v for k, v in optimizer.state.get(parameter, {}).items() if v is not None}
    for key, value in state.items():
        if not isinstance(value, torch.Tensor):
            raise CheckpointError(
                f"the state '{key}' that {type(optimizer).__name__} keeps of {name} is "
                f"{type(value).__name__}; only tensors can be saved: choose another optimizer.name, or set "
                "checkpoint.save_optim = false"
            )
    return state


def check_missing(stored: Iterable[str], parameters: Parameters, may_miss: MayMiss) -> None:
    """Raise CheckpointError that names the parameters without state that should have one."""
    have = {key.rpartition("/")[0] for key in stored}
    stepped = {name.partition(".")[0] for name in have}
    missing = [
        name
        for name in parameters
        if name not in have
        and name.partition(".")[0] in stepped
        and not any(part in name for part in may_miss.get(name.partition(".")[0], ()))
    ]
    if missing:
        raise CheckpointError(
            f"{len(missing)} trained parameters have no optimizer state, because no gradient ever reached "
            f"them: {', '.join(missing[:5])}{' …' if len(missing) > 5 else ''}\nleave them out of what is "
            "trained (lora.target_modules), or name them in optimizer_state_may_miss of the family"
        )


def check_known(stored: Iterable[str], parameters: Parameters) -> None:
    """Raise CheckpointError for state of a parameter that the model does not train."""
    unknown = sorted({key.rpartition("/")[0] for key in stored} - parameters.keys())
    if unknown:
        raise CheckpointError(
            f"the checkpoint has optimizer state of {len(unknown)} parameters that this recipe does not "
            f"train: {', '.join(unknown[:3])}; use the recipe that the checkpoint was made with"
        )


def targets_for(metadata: Metadata, parameters: Parameters) -> dict[str, torch.Tensor]:
    """Return new tensors to read a stored state into, placed and sharded as their parameters are.

    A state of another shape than its parameter (a step count) is whole on every rank.
    """
    targets = {}
    for key, entry in entries(metadata).items():
        parameter, dtype = parameters[key.rpartition("/")[0]].detach(), entry.properties.dtype
        targets[key] = (
            torch.zeros_like(parameter, dtype=dtype)
            if entry.size and entry.size == parameter.shape
            else torch.zeros(entry.size, dtype=dtype)
        )
    return targets


def put_state(
    optimizer: torch.optim.Optimizer, parameters: Parameters, tensors: Mapping[str, torch.Tensor]
) -> None:
    """Give the optimizer a state that was read; its settings stay those of the recipe."""
    names = {id(parameter): name for name, parameter in parameters.items()}
    by_name: dict[str, dict[str, torch.Tensor]] = {}
    for key, tensor in tensors.items():
        name, _, kind = key.rpartition("/")
        by_name.setdefault(name, {})[kind] = tensor
    state: dict[int, Any] = {}
    owned = [p for group in optimizer.param_groups for p in group["params"]]
    for number, parameter in enumerate(owned):
        if (found := by_name.get(names.get(id(parameter), ""))) is not None:
            state[number] = found
    optimizer.load_state_dict(
        {"state": state, "param_groups": optimizer.state_dict()["param_groups"]}
    )

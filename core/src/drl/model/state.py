"""Training state on disk: trainable parameters, optimizer moments, counters. Safetensors and JSON only."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from drl.errors import CheckpointError

if TYPE_CHECKING:
    from pathlib import Path

    from torch import Tensor, nn

PARAMETERS = "model.safetensors"
OPTIMIZER = "optimizer.safetensors"
COUNTERS = "trainer.json"


def write_state(
    path: Path,
    *,
    parameters: Mapping[str, nn.Parameter],
    optimizer: torch.optim.Optimizer,
    counters: Mapping[str, int],
) -> None:
    """Write into an existing folder; the caller makes the folder appear at once."""
    tensors = {name: p.detach().cpu().contiguous() for name, p in parameters.items()}
    save_file(tensors, path / PARAMETERS)
    moments = {
        f"{key}|{name}": value.detach().cpu().contiguous()
        for name, parameter in parameters.items()
        for key, value in optimizer.state.get(parameter, {}).items()
        if isinstance(value, torch.Tensor)
    }
    save_file(moments, path / OPTIMIZER)
    (path / COUNTERS).write_text(json.dumps(dict(counters), indent=2, sort_keys=True) + "\n")


def read_state(
    path: Path,
    *,
    parameters: Mapping[str, nn.Parameter],
    optimizer: torch.optim.Optimizer,
) -> dict[str, int]:
    """Restore in place and return the counters; raises CheckpointError before anything changed."""
    tensors = _load(path / PARAMETERS)
    moments = _load(path / OPTIMIZER)
    check_names(path, tensors, parameters)
    states = _optimizer_states(path, moments, parameters)
    with torch.no_grad():
        for name, parameter in parameters.items():
            parameter.copy_(tensors[name])
    for name, state in states.items():
        optimizer.state[parameters[name]] = state
    counters: dict[str, int] = json.loads((path / COUNTERS).read_text())
    return counters


def _load(file: Path) -> dict[str, Tensor]:
    try:
        return load_file(file)
    except (OSError, SafetensorError) as error:
        raise CheckpointError(
            f"{file}: cannot be read ({error})\nresume from an earlier checkpoint of the run"
        ) from error


def check_names(
    path: Path, tensors: Mapping[str, Tensor], parameters: Mapping[str, nn.Parameter]
) -> None:
    """Raise CheckpointError when names or shapes differ from the model that is being restored."""
    missing = sorted(parameters.keys() - tensors.keys())
    unexpected = sorted(tensors.keys() - parameters.keys())
    wrong = [
        f"{name}: {tuple(tensors[name].shape)}, the model has {tuple(p.shape)}"
        for name, p in parameters.items()
        if name in tensors and tensors[name].shape != p.shape
    ]
    if missing or unexpected or wrong:
        raise CheckpointError(
            f"{path} does not fit this recipe's model: {len(missing)} missing {missing[:3]}, "
            f"{len(unexpected)} unexpected {unexpected[:3]}, {len(wrong)} of another shape {wrong[:3]}\n"
            "resume with the recipe that the checkpoint was made with"
        )


def _optimizer_states(
    path: Path, moments: Mapping[str, Tensor], parameters: Mapping[str, nn.Parameter]
) -> dict[str, dict[str, Any]]:
    states: dict[str, dict[str, Any]] = {}
    for key, value in moments.items():
        kind, _, name = key.partition("|")
        if name not in parameters:
            raise CheckpointError(f"{path / OPTIMIZER}: state of unknown parameter '{name}'")
        device = "cpu" if kind == "step" else parameters[name].device
        states.setdefault(name, {})[kind] = value.to(device)
    return states

"""A model of a few numbers, its optimizer and what else a training state is made of, without a trainer."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn

from drl.checkpoint.keeper import EVERYTHING, Parts, SaveSettings, StateKeeper
from drl.checkpoint.state import RestoreOptions
from drl.errors import CheckpointError
from drl.mathematics.schedule import ScheduleSettings
from drl.model.ema import Ema, EmaSettings
from drl.model.parallel import ALONE, Ranks
from drl.model.scaler import LossScaler

CPU = torch.device("cpu")
SCHEDULE = ScheduleSettings(lr=0.1, decay_iters=10)


def two_parts(seed: int = 0, **changes: object) -> Parts:
    """Return parts of a model with two components, AdamW, and no EMA unless given."""
    torch.manual_seed(seed)
    models = {"transformer": nn.Linear(4, 3), "transformer_2": nn.Linear(3, 2)}
    return parts_of(models, **changes)


def parts_of(models: dict[str, nn.Module], **changes: object) -> Parts:
    """Return the parts of these models."""
    parameters = {f"{c}.{n}": p for c, m in models.items() for n, p in m.named_parameters()}
    parts = Parts(
        models=models,
        parameters=parameters,
        optimizer=torch.optim.AdamW(parameters.values(), lr=0.1),
        ema=None,
        scaler=LossScaler(enabled=False),
        schedule=SCHEDULE,
        position={
            "iteration": 3,
            "rollout_id": 2,
            "next_rollout_id": 3,
            "global_step": 7,
            "bad_steps": 1,
        },
    )
    return replace(parts, **changes)


def with_ema(parts: Parts, **settings: float) -> Parts:
    """Return the parts with a moving average."""
    return replace(parts, ema=Ema(parts.parameters, EmaSettings(**settings)))


def step(parts: Parts, *, seed: int = 0, only: str = "") -> None:
    """Take one optimizer step on random gradients, of the parameters whose names begin so."""
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in parts.parameters.items():
        fits = name.startswith(only)
        parameter.grad = torch.randn(parameter.shape, generator=generator) if fits else None
    parts.optimizer.step()
    if parts.ema is not None:
        parts.ema.update()


def keeper(
    settings: SaveSettings = EVERYTHING, *, seed: int = 1, ranks: Ranks = ALONE
) -> StateKeeper:
    """Return a keeper on the CPU."""
    return StateKeeper(seed=seed, device=CPU, settings=settings, ranks=ranks)


def saved(folder: Path, parts: Parts, settings: SaveSettings = EVERYTHING) -> Path:
    """Save parts into a new folder and return it."""
    folder.mkdir(parents=True)
    keeper(settings).save(folder, parts)
    return folder


def weights(parts: Parts) -> dict[str, torch.Tensor]:
    """Return copies of the parameters."""
    return {name: p.detach().clone() for name, p in parts.parameters.items()}


def moments(parts: Parts) -> dict[str, torch.Tensor]:
    """Return copies of the optimizer's state by parameter and kind."""
    return {
        f"{name}/{kind}": value.clone()
        for name, p in parts.parameters.items()
        for kind, value in parts.optimizer.state[p].items()
    }


def same(left: dict[str, torch.Tensor], right: dict[str, torch.Tensor]) -> bool:
    """True when both hold the same names and bits."""
    return left.keys() == right.keys() and all(torch.equal(left[k], right[k]) for k in left)


def before_and_after(
    folder: Path,
    other: Parts,
    options: RestoreOptions | None = None,
    settings: SaveSettings | None = None,
) -> str:
    """Restore, which must fail; return the message. Nothing may have changed."""
    old = weights(other)
    shadow = None if other.ema is None else {k: v.clone() for k, v in other.ema.state().items()}
    made = keeper(settings or SaveSettings())
    with pytest.raises(CheckpointError) as caught:
        made.restore(folder, other, options or RestoreOptions())
    assert same(weights(other), old)
    assert not other.optimizer.state
    assert shadow is None or same(other.ema.state(), shadow)
    return str(caught.value)

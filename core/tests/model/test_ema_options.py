"""Each option of ``[ema]`` changes what the average is, by numbers worked out by hand."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from drl.model.ema import build_ema

LIVE = (8.0, 4.0, 16.0, 2.0)
"""The weight, which starts at 0, after each of four updates."""

DEFAULTS: dict[str, Any] = {
    "enabled": True,
    "rollout_policy": "live",
    "decay_init": 0.001,
    "decay_ramp": 0.001,
    "decay_max": 0.5,
    "decay_flat_steps": 0,
}


def shadows(**options: Any) -> list[float]:
    """The average after each update."""
    model = nn.Linear(1, 1, bias=False)
    nn.init.zeros_(model.weight)
    recipe = SimpleNamespace(ema=SimpleNamespace(**(DEFAULTS | options)))
    ema = build_ema(recipe, {"transformer.weight": model.weight}, {"transformer": model})
    assert ema is not None
    found = []
    for value in LIVE:
        with torch.no_grad():
            model.weight.fill_(value)
        ema.update()
        found.append(ema.state()["transformer.weight"].item())
    return found


def by_hand(decays: tuple[float, ...]) -> list[float]:
    shadow, found = 0.0, []
    for decay, value in zip(decays, LIVE, strict=True):
        shadow = decay * shadow + (1 - decay) * value
        found.append(shadow)
    return found


@pytest.mark.parametrize(
    ("options", "decays"),
    [
        ({}, (0.001, 0.002, 0.003, 0.004)),
        # without flat updates the first value is never used
        ({"decay_init": 0.9}, (0.001, 0.002, 0.003, 0.004)),
        ({"decay_init": 0.9, "decay_flat_steps": 2}, (0.9, 0.9, 0.001, 0.002)),
        ({"decay_init": 0.2, "decay_flat_steps": 2}, (0.2, 0.2, 0.001, 0.002)),
        ({"decay_flat_steps": 3}, (0.001, 0.001, 0.001, 0.001)),
        ({"decay_ramp": 0.2}, (0.2, 0.4, 0.5, 0.5)),
        ({"decay_ramp": 0.2, "decay_max": 0.7}, (0.2, 0.4, 0.6, 0.7)),
        ({"decay_ramp": 0.0}, (0.0, 0.0, 0.0, 0.0)),
        ({"decay_ramp": 0.2, "decay_max": 0.0}, (0.0, 0.0, 0.0, 0.0)),
        (
            {"decay_flat_steps": 1, "decay_init": 0.5, "decay_ramp": 0.1, "decay_max": 0.9},
            (0.5, 0.1, 0.2, 0.3),
        ),
    ],
)
def test_decays_follow_the_table(options: dict[str, Any], decays: tuple[float, ...]) -> None:
    assert shadows(**options) == pytest.approx(by_hand(decays), rel=1e-6)


def test_without_the_option_there_is_no_average() -> None:
    weight = nn.Parameter(torch.zeros(1))
    recipe = SimpleNamespace(ema=SimpleNamespace(**(DEFAULTS | {"enabled": False})))
    assert build_ema(recipe, {"transformer.weight": weight}, {}) is None

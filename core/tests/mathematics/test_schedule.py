"""Learning rates against numbers worked by hand and the golden schedules."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest

from drl.errors import BadInput, CheckpointError
from drl.mathematics.schedule import (
    ScheduleSettings,
    learning_rate,
    schedule_state,
    settings_from_state,
)
from drl.testing.golden import load_golden


def settings(**changes: Any) -> ScheduleSettings:
    return ScheduleSettings(**{"lr": 1e-3, "decay_iters": 25, "min_lr": 1e-5, **changes})


def test_golden_schedules() -> None:
    cases = load_golden("lr_schedules")["cases"]
    assert len(cases) == 32
    for case in cases:
        fraction = case["warmup_fraction"]
        warmup = case["warmup_iters"] if fraction is None else fraction * case["decay_iters"]
        made = ScheduleSettings(
            lr=case["lr"],
            min_lr=case["min_lr"],
            style=case["style"],
            decay_iters=case["decay_iters"],
            warmup=warmup,
            warmup_init=case["warmup_init"],
            wsd_decay_iters=case["wsd_decay_iters"],
            wsd_decay_style=case["wsd_style"],
        )
        rates = [learning_rate(step, made) for step in range(30)]
        assert rates == pytest.approx(case["lr_at_step"], rel=1e-12), case["style"]


def test_golden_decay_length_from_batch_sizes() -> None:
    derived = load_golden("lr_schedules")["derived_iters"]
    total = derived["rollout_batch_size"] * derived["n_samples_per_prompt"] * derived["num_rollout"]
    made = settings(style="linear", decay_iters=total // derived["global_batch_size"])
    rates = [learning_rate(step, made) for step in range(30)]
    assert rates == pytest.approx(derived["lr_at_step"], rel=1e-12)


def test_constant_without_warmup_is_the_rate_itself() -> None:
    assert [learning_rate(step, settings()) for step in (0, 1, 1000)] == [1e-3] * 3


def test_warmup_starts_at_its_init_and_ends_at_the_rate() -> None:
    made = settings(warmup=4, warmup_init=2e-4)
    rates = [learning_rate(step, made) for step in range(6)]
    assert rates == pytest.approx([2e-4, 4e-4, 6e-4, 8e-4, 1e-3, 1e-3])


def test_a_fractional_warmup_is_not_rounded() -> None:
    assert learning_rate(2, settings(warmup=2.5)) == pytest.approx(0.8e-3)


@pytest.mark.parametrize(
    ("style", "middle"),
    [("linear", 0.505e-3), ("cosine", 0.505e-3), ("inverse-square-root", 1e-3 / math.sqrt(10))],
)
def test_decay_at_the_middle(style: str, middle: float) -> None:
    made = settings(style=style, decay_iters=20)
    assert learning_rate(10, made) == pytest.approx(middle)


@pytest.mark.parametrize("style", ["linear", "cosine"])
def test_decay_ends_at_the_floor_and_stays(style: str) -> None:
    assert learning_rate(25, settings(style=style)) == pytest.approx(1e-5)
    assert learning_rate(99, settings(style=style)) == 1e-5


@pytest.mark.parametrize(
    ("tail", "share"),
    [
        ("linear", 0.5),
        ("cosine", 0.5),
        ("exponential", 2 * 0.5**0.5 - 1),
        ("minus_sqrt", 1 - 0.5**0.5),
    ],
)
def test_wsd_is_flat_and_then_falls_in_the_chosen_shape(tail: str, share: float) -> None:
    made = settings(style="WSD", wsd_decay_iters=10, wsd_decay_style=tail)
    assert learning_rate(15, made) == pytest.approx(1e-3)
    assert learning_rate(20, made) == pytest.approx(1e-5 + share * (1e-3 - 1e-5))
    assert learning_rate(25, made) == pytest.approx(1e-5)


@pytest.mark.parametrize(
    ("changes", "option"),
    [
        ({"style": "poly"}, "lr_decay_style"),
        ({"style": "poly", "warmup": 5}, "lr_decay_style"),
        ({"min_lr": 1.0}, "min_lr"),
        ({"min_lr": -1e-6}, "min_lr"),
        ({"warmup_init": 1.0}, "lr_warmup_init"),
        ({"decay_iters": 0}, "lr_decay_iters"),
        ({"warmup": 25}, "lr_warmup_iters"),
        ({"style": "WSD"}, "lr_wsd_decay_iters"),
        ({"style": "WSD", "wsd_decay_iters": 10}, "lr_wsd_decay_style"),
        (
            {"style": "WSD", "wsd_decay_iters": 10, "wsd_decay_style": "poly"},
            "lr_wsd_decay_style",
        ),
    ],
)
def test_settings_that_contradict_are_refused_when_made(
    changes: dict[str, Any], option: str
) -> None:
    with pytest.raises(BadInput, match=rf"optimizer\.{option} "):
        settings(**changes)


def test_golden_errors_are_raised_when_settings_are_made() -> None:
    """Also those that the source raises only at the first step of the branch concerned."""
    names = {
        "lr_decay_style": "style",
        "lr_warmup_iters": "warmup",
        "lr_warmup_init": "warmup_init",
        "lr_decay_iters": "decay_iters",
        "lr_wsd_decay_iters": "wsd_decay_iters",
        "lr_wsd_decay_style": "wsd_decay_style",
    }
    cases = [c for c in load_golden("lr_schedules")["errors"] if c["case"] != "both_switches"]
    assert len(cases) == 9
    for case in cases:
        changes = {names.get(key, key): value for key, value in case["settings"].items()}
        with pytest.raises(BadInput, match=r"optimizer\.\w+ is"):
            settings(**changes)


@pytest.mark.parametrize("tail", ["linear", "cosine", "exponential", "minus_sqrt"])
def test_the_tail_of_wsd_meets_the_flat_part_and_the_floor(tail: str) -> None:
    made = settings(style="WSD", wsd_decay_iters=25, wsd_decay_style=tail)
    assert learning_rate(0, made) == pytest.approx(1e-3)
    assert learning_rate(25, made) == pytest.approx(1e-5)
    assert learning_rate(26, made) == 1e-5


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"style": "cosine", "warmup": 2.5, "warmup_init": 1e-4},
        {"style": "WSD", "wsd_decay_iters": 10, "wsd_decay_style": "minus_sqrt"},
    ],
)
def test_the_state_of_a_schedule_gives_the_schedule_back_through_json(
    changes: dict[str, Any],
) -> None:
    made = settings(**changes)
    again = settings_from_state(json.loads(json.dumps(schedule_state(made))))
    assert again == made
    assert [learning_rate(s, again) for s in range(30)] == [
        learning_rate(s, made) for s in range(30)
    ]


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"lr": None}, "NoneType"),
        ({"style": "poly"}, r"optimizer\.lr_decay_style is 'poly'"),
        ({"extra": 1}, r"has the settings \[.*'extra'.*\]; they must be"),
    ],
)
def test_a_damaged_state_of_a_schedule_is_refused(change: dict[str, Any], said: str) -> None:
    with pytest.raises(CheckpointError, match=said):
        settings_from_state({**schedule_state(settings()), **change})


def test_a_state_that_lacks_a_setting_is_refused() -> None:
    state = schedule_state(settings())
    del state["min_lr"]
    with pytest.raises(CheckpointError, match=r"they must be .*min_lr"):
        settings_from_state(state)

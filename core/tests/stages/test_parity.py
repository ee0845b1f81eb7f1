"""How far the trainer's log-probs are from the engine's: worst and mean by step, over ranks too."""

from __future__ import annotations

import math
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from drl.errors import BadInput, BatchError, ContractError
from drl.interfaces.family import Family, Route
from drl.interfaces.loss import Loss
from drl.interfaces.steps import SdeBackend
from drl.mathematics.gaussian import over_rows
from drl.stages.loss import Forward, check_noise
from drl.stages.pairs import build_shards
from drl.stages.parity import compared, joined
from drl.testing import make_pair
from drl.types import (
    VISUAL,
    Condition,
    Context,
    ForwardInputs,
    Guidance,
    Need,
    Pair,
    ParityReport,
    StepContext,
    Transition,
    successor,
)

NAN = float("nan")
CONTEXT = StepContext()


class Toy(SimpleNamespace):
    """A family by its functions; guidance is as in all families."""

    conditions = Family.conditions
    predict = Family.predict


FAMILY: Any = Toy(
    condition=lambda record: Condition(arguments={}),
    collate=lambda rows: Condition(arguments={}, rows=len(rows)),
    route=lambda timestep: Route(),
    model_time=lambda sigma_B, timestep_B: timestep_B,
    forward=lambda model, streams, time_B, condition: {VISUAL: model(streams[VISUAL])},
)


class First(SdeBackend):
    """The first number of the latents is the log-prob; the noise is half the next sigma."""

    def transition(
        self, latents: Any, velocity: Any, sigma_B: Any, sigma_next_B: Any, *, sigma_max_B: Any
    ) -> Transition:
        mean = latents + 0 * velocity + 0 * over_rows(sigma_B, latents)
        return Transition(mean=mean, noise_std=sigma_next_B, std_dev_t=sigma_next_B / 2)

    def log_prob(self, next_latents: Any, transition: Transition) -> Any:
        return transition.mean.flatten(1)[:, 0]


class Scored(Loss):
    """Recorded steps, and nothing to compute."""

    needs = frozenset({Need.TRANSITION})

    def expand(self, unit: Any, advantages: Any, context: StepContext) -> list[Pair]:
        raise NotImplementedError

    def prepare(self, pairs: Any, context: StepContext) -> ForwardInputs:
        return ForwardInputs(streams={VISUAL: pairs.tensors[VISUAL]})

    def compute(self, pairs: Any, inputs: Any, predictions: Any, transition: Any) -> Any:
        raise NotImplementedError


def forward_of(**changes: Any) -> Forward:
    values: dict[str, Any] = {
        "family": FAMILY,
        "models": {"transformer": nn.Identity()},
        "loss": Scored(None, Context()),
        "backend": First(None, Context()),
        "device": torch.device("cpu"),
        "dtype": "fp32",
        "guidance": {"guidance_scale": Guidance()},
    }
    return Forward(**(values | changes))


def pair(
    index: int, step: int, new: float, old: float, weight: float = 1.0, after: float = 0.5
) -> Pair:
    values = {
        "log_prob_old": old,
        "step": float(step),
        "sigma_next": after,
        "sigma_max": 0.9,
    }
    made = make_pair(id=(index, step), weight=weight, values=values)
    latents = torch.full((1, 1, 2), new)
    return replace(made, tensors={VISUAL: latents, successor(VISUAL): latents})


ROWS = [
    [pair(0, 2, 1.0, 0.5), pair(0, 5, 1.0, 1.0), pair(1, 2, -1.0, -1.25)],
    [pair(1, 5, 2.0, 2.125), pair(2, 2, 9.0, 0.0, weight=0.0), pair(3, 2, 0.0, 0.0)],
]


def test_worst_and_mean_of_each_step_by_hand() -> None:
    report = compared(forward_of(), [(rows, CONTEXT) for rows in ROWS])
    assert report.by_step == {2: 0.5, 5: 0.125}
    assert report.mean_by_step == {2: 0.25, 5: 0.0625}
    assert report.rows_by_step == {2: 3, 5: 2}
    assert report.rows == 5
    assert report.worst == 0.5
    assert report.mean == pytest.approx((0.5 + 0.25 + 0.125) / 5)


def test_ranks_join_to_the_report_of_all_rows() -> None:
    forward = forward_of()
    parts = [compared(forward, [(rows, CONTEXT)]) for rows in ROWS]
    assert joined(parts) == compared(forward, [(rows, CONTEXT) for rows in ROWS])
    nothing = ParityReport(by_step={}, rows=0)
    assert joined([parts[0], nothing]) == parts[0]
    assert joined([nothing]).worst == joined([nothing]).mean == 0.0


@pytest.mark.parametrize("order", [0, 1])
def test_nan_shows_in_worst_and_mean(order: int) -> None:
    rows = [pair(0, 1, NAN, 0.0), pair(1, 1, 1.0, 0.0)]
    report = compared(forward_of(), [(rows[::-1] if order else rows, CONTEXT)])
    assert math.isnan(report.worst)
    assert math.isnan(report.mean)
    assert math.isnan(joined([report, report]).worst)


def test_what_cannot_be_compared_is_said() -> None:
    loss = Scored(None, Context())
    loss.needs = frozenset()
    with pytest.raises(ContractError, match="only losses that need a transition score"):
        compared(forward_of(loss=loss), [(ROWS[0], CONTEXT)])
    without = replace(ROWS[0][0], values={"sigma_next": 0.5, "sigma_max": 0.9})
    with pytest.raises(BatchError, match="'log_prob_old'"):
        compared(forward_of(), [([without], CONTEXT)])


def noise_checked(*pairs: Pair, divides: bool = True) -> None:
    loss = Scored(None, Context())
    loss.divides_by_noise = divides
    units = [[one] for one in pairs]
    (shard,) = build_shards(units, steps=1, micro_batch_size=2, ranks=1, rollout_id=0)
    check_noise(forward_of(loss=loss), shard)


def test_steps_without_noise_are_refused_before_training() -> None:
    silent = pair(7, 9, 0.0, 0.0, after=0.0)
    with pytest.raises(BadInput, match=r"\[\(7, 9\)\] have no noise to divide the KL by"):
        noise_checked(pair(0, 1, 0.0, 0.0), silent, pair(7, 8, 0.0, 0.0))
    noise_checked(pair(0, 1, 0.0, 0.0), silent, divides=False)
    noise_checked(*(pair(0, step, 0.0, 0.0) for step in range(5)))


def test_each_kind_of_step_is_named_once() -> None:
    """A thousand samples share a step: the message shows the first of them."""
    pairs = [pair(index, 9, 0.0, 0.0, after=0.0) for index in range(20)]
    with pytest.raises(BadInput, match=r"\[\(0, 9\)\] have no noise"):
        noise_checked(*pairs)

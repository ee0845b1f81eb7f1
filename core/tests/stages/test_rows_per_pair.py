"""A loss may feed several rows of one pair: they share what the pair was conditioned on, and its time."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from drl.interfaces.family import Family, Route
from drl.interfaces.loss import Loss
from drl.mathematics.gaussian import over_rows
from drl.stages.loss import Forward, loss_of
from drl.testing import make_pair
from drl.types import (
    VISUAL,
    Condition,
    Context,
    ForwardInputs,
    Guidance,
    LossOutput,
    Need,
    Pair,
    PairBatch,
    Predictions,
    StepContext,
)


class Scales(Loss):
    """Feeds each pair's latents as often as there are factors, times the factor."""

    needs = frozenset({Need.GUIDANCE})
    factors: tuple[float, ...] = (1.0,)
    found: Tensor
    reference: Tensor | None = None

    def expand(self, unit: Any, advantages: Any, context: StepContext) -> list[Pair]:
        raise NotImplementedError

    def prepare(self, pairs: PairBatch, context: StepContext) -> ForwardInputs:
        rows = torch.cat([factor * pairs.tensors[VISUAL] for factor in self.factors])
        return ForwardInputs(streams={VISUAL: rows}, rows_per_pair=len(self.factors))

    def compute(
        self, pairs: PairBatch, inputs: ForwardInputs, predictions: Predictions, transition: Any
    ) -> LossOutput:
        self.found = predictions.trained[VISUAL]
        self.reference = None if predictions.reference is None else predictions.reference[VISUAL]
        return LossOutput(loss=self.found.sum(), metrics={})


def velocity(model: nn.Module, streams: Any, time_B: Tensor, condition: Condition) -> Any:
    """``x + time + mean of the text``: a row with another row's time or text shows."""
    text_B = condition.arguments["text"].flatten(1).mean(1)
    return {VISUAL: streams[VISUAL] + over_rows(time_B + text_B, streams[VISUAL])}


def collate(rows: list[Condition]) -> Condition:
    text = torch.cat([row.arguments["text"] for row in rows])
    return Condition(arguments={"text": text}, rows=len(rows))


class Toy(SimpleNamespace):
    """A family by its functions; guidance is as in all families."""

    conditions = Family.conditions
    predict = Family.predict


FAMILY: Any = Toy(
    condition=lambda record: Condition(arguments={"text": record.tensors["text"][None]}),
    collate=collate,
    route=lambda timestep: Route(),
    model_time=lambda sigma_B, timestep_B: 10 * sigma_B,
    forward=velocity,
    guide=lambda positive, negative, guidance: {
        VISUAL: negative[VISUAL] + guidance.scale * (positive[VISUAL] - negative[VISUAL])
    },
)


def run(factors: tuple[float, ...], pairs: list[Pair], scale: float = 1.0) -> Scales:
    loss = Scales(None, Context())
    loss.factors = factors
    forward = Forward(
        family=FAMILY,
        models={"transformer": nn.Identity()},
        loss=loss,
        backend=None,
        device=torch.device("cpu"),
        dtype="fp32",
        guidance={"guidance_scale": Guidance(scale=scale)},
        reference=lambda component: torch.no_grad(),
    )
    loss_of(forward, pairs, StepContext())
    return loss


@pytest.mark.parametrize("scale", [1.0, 3.0])
@pytest.mark.parametrize("factors", [(1.0,), (1.0, 2.0), (1.0, 2.0, -1.0)])
def test_row_k_b_plus_i_is_the_k_th_of_pair_i(factors: tuple[float, ...], scale: float) -> None:
    pairs = [make_pair(id=(n,), seed=n, sigma=0.1 * n + 0.2) for n in range(3)]
    loss = run(factors, pairs, scale)
    assert len(loss.found) == 3 * len(factors)
    for number, factor in enumerate(factors):
        for place, pair in enumerate(pairs):
            assert pair.condition is not None
            text = scale * pair.condition.tensors["text"].mean()
            expected = factor * pair.tensors[VISUAL] + 10 * pair.sigma + text
            assert torch.allclose(loss.found[3 * number + place], expected, atol=1e-4)


def test_the_reference_sees_the_same_rows() -> None:
    pairs = [make_pair(id=(n,), seed=n) for n in range(2)]
    loss = run((1.0, 2.0), pairs)
    assert loss.reference is not None
    assert torch.equal(loss.reference, loss.found)

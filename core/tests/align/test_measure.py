"""Figures of recorded steps: by hand, by step, and over the rows of a forward."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import nn

from drl.align.changes import Scene
from drl.align.measure import (
    PairFigures,
    average,
    by_step,
    draws_masks,
    largest,
    over_rows,
    rechunked,
    score,
    worst,
)
from drl.stages.alignment import OUTPUT
from drl.testing import make_pair
from drl.types import VISUAL, successor

Make = Callable[..., Scene]


def figures(step: int, new: float, old: float, output: float = math.nan) -> PairFigures:
    return PairFigures(
        step=step,
        sigma=1.0,
        log_prob=new,
        log_prob_old=old,
        output_mean=output,
        output_max=2 * output,
        output_rel=output / 10,
    )


def test_one_pair_by_hand(scene: Make) -> None:
    made = scene(scale=1.0, count=1, rows=1)
    (pair,) = made.pairs
    text = pair.condition.tensors["text"].mean() if pair.condition else 0.0
    x, after = pair.tensors[VISUAL], pair.tensors[successor(VISUAL)]
    velocity = 0.5 * x + text
    mean = x - 0.25 * velocity
    density = -((after - mean) ** 2) / (2 * 0.75**2) - math.log(0.75 * math.sqrt(2 * math.pi))
    (found,) = score(made.replay, made.batches).values()
    assert found.log_prob == pytest.approx(float(density.mean()), rel=1e-6)
    assert found.log_prob_diff == 0.0 == found.ratio_diff
    assert math.isnan(found.output_max), "the engine returned no outputs"
    wrong = replace(pair, debug={OUTPUT: velocity + torch.linspace(0, 0.5, 64).reshape(x.shape)})
    (found,) = score(made.replay, [[wrong]]).values()
    assert found.output_mean == pytest.approx(0.25, rel=1e-5)
    assert found.output_max == pytest.approx(0.5, rel=1e-5)
    assert found.output_rel == pytest.approx(0.5 / float(wrong.debug[OUTPUT].abs().max()), rel=1e-5)


def test_ratio_is_that_of_the_loss_and_overflows_to_infinity() -> None:
    assert figures(0, -1.0, -1.1).ratio_diff == pytest.approx(math.exp(0.1) - 1)
    assert figures(0, -1.1, -1.0).ratio_diff == pytest.approx(1 - math.exp(-0.1))
    assert figures(0, 800.0, -800.0).ratio_diff == math.inf
    assert figures(0, -800.0, 800.0).ratio_diff == 1.0


def test_steps_are_means_and_maxima_of_their_own_pairs() -> None:
    found = {
        (0, 1): figures(1, 1.0, 1.5, 0.25),
        (1, 1): figures(1, 1.0, 1.0, 0.75),
        (0, 0): figures(0, 2.0, 1.0, 0.5),
    }
    first, second = by_step(found)
    assert (first.step, first.pairs, first.log_prob_mean, first.log_prob_max) == (0, 1, 1.0, 1.0)
    assert (second.step, second.pairs, second.log_prob_mean) == (1, 2, 0.25)
    assert (second.log_prob_max, second.output_mean, second.output_max) == (0.5, 0.5, 1.5)
    assert second.output_rel == 0.075
    assert average(found) == 0.5
    assert worst(found) == 1.0


def test_nan_never_hides() -> None:
    found = {(0, 0): figures(0, math.nan, 0.0), (1, 0): figures(0, 1.0, 0.0)}
    (step,) = by_step(found)
    assert math.isnan(step.log_prob_max)
    assert math.isnan(worst(found))
    assert math.isnan(average(found))
    assert math.isnan(largest([]))


def test_filler_does_not_count_and_modes_come_back(scene: Make) -> None:
    made = scene(count=6, rows=4, dropout=0.5)
    (model,) = made.replay.forward.models.values()
    assert len(made.batches[-1]) == 4
    assert len(score(made.replay, made.batches)) == 6
    assert model.training
    model.eval()
    score(made.replay, made.batches)
    assert not model.training


def test_micro_batches_hold_one_component_and_are_full() -> None:
    pairs = [make_pair(id=(n, 0), unit=n, seed=n) for n in range(5)]
    pairs[3] = replace(pairs[3], component="transformer_2")
    batches = rechunked(pairs, 3)
    assert [[p.id[0] for p in batch if p.weight] for batch in batches] == [[0, 1, 2], [4], [3]]
    assert all(len(batch) == 3 for batch in batches)
    assert all(len({p.component for p in batch}) == 1 for batch in batches)


def test_rows_of_a_forward_show_what_they_change(scene: Make) -> None:
    made = scene(by_rows=0.01, engine_rows=8, count=8, scale=1.0)
    table = {one.rows: one for one in over_rows(made.replay, made.pairs, (1, 2, 4, 8, 16))}
    assert [*table] == [1, 2, 4, 8, 16]
    assert table[8].max == 0.0 == table[1].spread
    spreads = [table[rows].spread for rows in (1, 2, 4, 8, 16)]
    assert spreads == sorted(spreads)
    assert 0 < table[4].max < table[1].max


def test_sizes_that_do_not_fit_are_left_out(scene: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    made = scene()
    (model,) = made.replay.forward.models.values()

    def small_card(module: object, inputs: tuple[torch.Tensor, ...]) -> None:
        if inputs[0].shape[0] > 2:
            raise torch.OutOfMemoryError("no room")

    handle = model.register_forward_pre_hook(small_card)
    assert [one.rows for one in over_rows(made.replay, made.pairs, (1, 2, 4, 8))] == [1, 2]
    handle.remove()


@pytest.mark.parametrize(
    ("module", "draws"),
    [
        (nn.Dropout(0.1), True),
        (nn.Dropout(0.0), False),
        (nn.FeatureAlphaDropout(0.1), True),
        (nn.MultiheadAttention(4, 1, dropout=0.1), True),
        (nn.MultiheadAttention(4, 1), False),
        (nn.LSTM(2, 2, num_layers=2, dropout=0.5), True),
        (nn.Linear(2, 2), False),
        (nn.Sequential(nn.Linear(2, 2), nn.Dropout(0.0)), False),
    ],
    ids=lambda value: type(value).__name__,
)
def test_dropout_is_found_however_a_module_calls_it(module: nn.Module, draws: bool) -> None:
    assert any(map(draws_masks, module.modules())) == draws

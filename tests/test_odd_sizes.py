"""Sizes that divide nothing: whatever the split, a window's gradient is that of one big batch."""

from __future__ import annotations

from itertools import product

import pytest
import torch
from odd_ranks import CASES, OUTCOMES, run_cases
from odd_sizes import (
    STEPS,
    counts,
    make_forward,
    make_samples,
    make_trainer,
    one_big_batch,
    over_ranks,
    windows_of,
)
from ranked_trainer import start

from drl.stages.figures import training_figures
from drl.stages.shards import Layout, Tile, shards_of
from drl.stages.step import merged

SIZES = list(product((1, 2, 3), (1, 2, 3, 4, 5)))


@pytest.mark.parametrize(("prompts", "count"), SIZES)
def test_no_split_changes_the_gradient(prompts: int, count: int) -> None:
    """1 to 3 prompts x 1 to 5 samples x micro-batches of 1 to 4 x 1 to 3 windows x 1 to 3 ranks."""
    forward, samples = make_forward(), make_samples(prompts, count)
    left = STEPS * sum(counts(sample) for sample in samples)
    for steps in (1, 2, 3):
        windows = windows_of(forward, samples, steps)
        expected = [one_big_batch(forward, window) for window in windows]
        assert left == 0 or any(gradient.abs().max() > 0 for gradient in expected)
        for number, (micro, ranks) in enumerate(product((1, 2, 3, 4), (1, 2, 3))):
            split = ("contiguous", "stride")[number % 2]
            layout = Layout(micro_batch_size=micro, ranks=ranks, split=split)
            got, shards, _ = over_ranks(forward, windows, layout)
            assert sum(shards[0].window_weights) == left
            for right, gradient in zip(expected, got, strict=True):
                scale = max(right.abs().max().item(), 1e-3)
                torch.testing.assert_close(gradient, right, rtol=1e-5, atol=2e-6 * scale)


@pytest.mark.parametrize("order", ["sample_major", "timestep_major"])
@pytest.mark.parametrize(("prompts", "count"), [(1, 1), (2, 3), (3, 5)])
def test_tiles_do_not_change_the_gradient(prompts: int, count: int, order: str) -> None:
    forward, samples = make_forward(), make_samples(prompts, count)
    windows = windows_of(forward, samples, 2)
    expected = [one_big_batch(forward, window) for window in windows]
    for across, deep, ranks in product((1, 2, 4), (1, 2, 3), (1, 3)):
        tile = Tile(samples=across, steps=deep, order=order)
        got, _, _ = over_ranks(forward, windows, Layout(micro_batch_size=1, ranks=ranks, tile=tile))
        for right, gradient in zip(expected, got, strict=True):
            scale = max(right.abs().max().item(), 1e-3)
            torch.testing.assert_close(gradient, right, rtol=1e-5, atol=2e-6 * scale)


def test_masked_samples_leave_the_metrics_too() -> None:
    """Means are over the pairs that count, on any number of ranks."""
    forward, samples = make_forward(), make_samples(3, 5)
    kept = [sample for sample in samples if counts(sample)]
    assert 0 < len(kept) < len(samples)
    figures = []
    for chosen, ranks in ((samples, 1), (samples, 3), (kept, 1)):
        windows = windows_of(forward, chosen, 1)
        _, _, results = over_ranks(forward, windows, Layout(micro_batch_size=4, ranks=ranks))
        figures.append(merged([result.figures for result in results]))
    whole, ranked, alone = figures
    assert whole.counts["loss"] == alone.counts["loss"] == STEPS * len(kept)
    plain = {name for name in alone.sums if not name.endswith("_idx_0")}
    for name in plain:
        assert whole.sums[name] == pytest.approx(alone.sums[name], rel=1e-5), name
        assert ranked.sums[name] == pytest.approx(alone.sums[name], rel=1e-5), name


def test_a_window_of_masked_samples_has_no_weight() -> None:
    forward, samples = make_forward(), make_samples(2, 2)
    for sample in samples[2:]:
        sample.remove_sample = True
    windows = windows_of(forward, samples, 2)
    got, shards, _ = over_ranks(forward, windows, Layout(micro_batch_size=3, ranks=2))
    assert shards[0].window_weights[1] == 0
    assert got[1].tolist() == [0.0, 0.0]
    assert got[0].abs().max() > 0


def test_a_window_of_masked_samples_is_skipped_and_counted() -> None:
    """Between two windows that train; neither weights nor optimizer notice it."""
    forward, samples = make_forward(), make_samples(3, 2)
    for sample in samples:
        sample.reward, sample.removed = 1.0, sample.group_index == 1
    (shard,) = shards_of(windows_of(forward, samples, 3), Layout(micro_batch_size=3), 0)
    trainer, seen, weights = make_trainer(forward), [], []
    for report in trainer.train([shard]):
        seen.append(report.skipped)
        weights.append([p.item() for p in forward.models["transformer"].parameters()])
    assert seen == [None, "every row of the window has weight 0", None]
    assert weights[0] == weights[1] != weights[2]
    assert trainer.bad_steps == 0
    reports = list(make_trainer(make_forward()).train([shard]))
    assert training_figures(reports)["train/skipped_steps"] == 1.0


def test_fewer_samples_than_windows_train_what_there_is() -> None:
    forward, samples = make_forward(), make_samples(1, 2)
    (shard,) = shards_of(windows_of(forward, samples, 4), Layout(micro_batch_size=3), 0)
    reports = list(make_trainer(forward).train([shard]))
    assert [report.skipped is None for report in reports] == [True, True, False, False]


@pytest.fixture(scope="module")
def three_ranks() -> dict[int, str]:
    """What three processes say about each case."""
    trainer = start(run_cases, 3)
    outcomes = dict(OUTCOMES)
    trainer.close()
    return outcomes


@pytest.mark.parametrize("case", range(len(CASES)))
def test_three_real_ranks_have_the_gradients_of_one(three_ranks: dict[int, str], case: int) -> None:
    assert not three_ranks[case], three_ranks[case]

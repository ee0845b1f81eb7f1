"""Batch arithmetic: units to windows to ranks to micro-batches, with filler of weight 0."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from drl.config.batch import batch_knobs
from drl.errors import BatchError
from drl.stages.pairs import (
    BatchPlan,
    batch_plan,
    build_shards,
    fill,
    split_evenly,
    unit_spans,
)
from drl.testing import make_pair, make_sample


def units_of(samples: int, steps: int) -> list[list]:
    return [[make_pair(id=(s, t), unit=s) for t in range(steps)] for s in range(samples)]


def rows_of(shards) -> list[tuple[int, ...]]:
    return [
        pair.id
        for shard in shards
        for window in shard.windows
        for batch in window
        for pair in batch
        if pair.weight
    ]


def test_the_reference_example_of_768_samples():
    plan = BatchPlan(
        prompts=48,
        samples_per_prompt=16,
        optimizer_steps=2,
        samples_per_step=384,
        pairs_per_sample=1,
        micro_batch_size=2,
        ranks=4,
    )
    assert (plan.samples, plan.pairs_per_step) == (768, 384)
    assert plan.micro_batches == 48
    assert plan.filler == 0


def test_a_plan_says_how_many_rows_are_filler():
    plan = BatchPlan(
        prompts=7,
        samples_per_prompt=5,
        optimizer_steps=1,
        samples_per_step=35,
        pairs_per_sample=3,
        micro_batch_size=16,
    )
    assert plan.micro_batches == 7
    assert plan.filler == 7 * 16 - 105
    assert any("7 rows of filler" in line for line in plan.lines())


@pytest.mark.parametrize(
    ("gbs", "steps", "expected"), [(None, None, 1), (16, None, 4), (None, 2, 2), (32, 2, 2)]
)
def test_steps_follow_from_either_knob(gbs, steps, expected):
    assert batch_knobs(64, gbs, steps) == (64 // expected, expected)


@pytest.mark.parametrize(
    ("gbs", "steps", "rule"), [(48, None, "B4"), (None, 3, "B4"), (16, 2, "B3")]
)
def test_contradicting_knobs_are_named_by_rule(gbs, steps, rule):
    with pytest.raises(BatchError, match=rule):
        batch_knobs(64, gbs, steps)


def test_batch_plan_reads_the_recipe():
    recipe = SimpleNamespace(
        rollout=SimpleNamespace(batch_size=8, n_samples_per_prompt=8),
        train=SimpleNamespace(
            global_batch_size=32, num_steps_per_rollout=None, micro_batch_size=16, train_only=False
        ),
        sde=SimpleNamespace(num_steps=3, step_strategy="sde_window"),
        sampling=SimpleNamespace(num_steps=8),
        cluster=SimpleNamespace(actor_num_nodes=1, actor_num_gpus_per_node=3),
        step_share=None,
    )
    plan = batch_plan(recipe)
    # 32 samples on 3 ranks: 11 of 3 pairs on the fullest, in micro-batches of 16
    assert (plan.optimizer_steps, plan.pairs_per_step, plan.micro_batches) == (2, 96, 3)
    assert plan.ranks == 3
    assert "3 micro-batches of 16 pairs on each of 3 rank(s), 48 rows of filler" in plan.lines()


def test_strategy_all_makes_every_denoising_step_a_pair():
    recipe = SimpleNamespace(
        rollout=SimpleNamespace(batch_size=1, n_samples_per_prompt=2),
        train=SimpleNamespace(
            global_batch_size=None, num_steps_per_rollout=None, micro_batch_size=1, train_only=False
        ),
        sde=SimpleNamespace(num_steps=2, step_strategy="all"),
        sampling=SimpleNamespace(num_steps=5),
        cluster=SimpleNamespace(actor_num_nodes=1, actor_num_gpus_per_node=1),
        step_share=None,
    )
    assert batch_plan(recipe).pairs_per_sample == 5
    recipe.step_share = 0.5
    assert batch_plan(recipe).pairs_per_sample == 2


def test_more_trained_steps_do_not_mean_more_optimizer_steps():
    one = build_shards(units_of(4, 1), steps=2, micro_batch_size=2, ranks=1, rollout_id=0)
    three = build_shards(units_of(4, 3), steps=2, micro_batch_size=2, ranks=1, rollout_id=0)
    assert len(one[0].windows) == len(three[0].windows) == 2


def test_seven_prompts_of_five_on_three_ranks_weigh_every_sample_once():
    shards = build_shards(units_of(35, 1), steps=1, micro_batch_size=2, ranks=3, rollout_id=0)
    assert sorted(rows_of(shards)) == [(s, 0) for s in range(35)]
    assert {shard.window_weights[0] for shard in shards} == {35.0}


@given(
    samples=st.integers(1, 9),
    trained=st.integers(1, 3),
    micro=st.integers(1, 4),
    ranks=st.integers(1, 3),
    steps=st.integers(1, 3),
)
def test_every_pair_appears_once_whatever_the_split(samples, trained, micro, ranks, steps):
    steps = min(steps, samples)
    shards = build_shards(
        units_of(samples, trained), steps=steps, micro_batch_size=micro, ranks=ranks, rollout_id=0
    )
    assert sorted(rows_of(shards)) == [(s, t) for s in range(samples) for t in range(trained)]
    counts = {tuple(len(window) for window in shard.windows) for shard in shards}
    assert len(counts) == 1, "every rank must run the same number of micro-batches"
    sizes = {len(batch) for shard in shards for window in shard.windows for batch in window}
    assert sizes == {micro}
    for shard in shards:
        for window, weight in zip(shard.windows, shard.window_weights, strict=True):
            assert weight == sum(
                p.weight
                for other in shards
                for w, x in zip(other.windows, shard.windows, strict=True)
                if x is window
                for b in w
                for p in b
            )


def test_a_unit_never_parts_across_windows():
    (shard,) = build_shards(units_of(5, 3), steps=2, micro_batch_size=4, ranks=1, rollout_id=0)
    windows = [{p.unit for batch in window for p in batch if p.weight} for window in shard.windows]
    assert windows[0].isdisjoint(windows[1])


def test_removed_samples_leave_the_divisor():
    units = units_of(4, 2)
    units[1] = [replace(pair, weight=0.0) for pair in units[1]]
    (shard,) = build_shards(units, steps=1, micro_batch_size=4, ranks=1, rollout_id=0)
    assert shard.window_weights == [6.0]


def test_filler_repeats_a_row_with_weight_0():
    pairs = [make_pair(id=(n,)) for n in range(3)]
    batches = fill(pairs, pairs[0], 2, 2)
    assert [[p.id for p in batch] for batch in batches] == [[(0,), (1,)], [(2,), (2,)]]
    assert [p.weight for p in batches[1]] == [1.0, 0.0]


def test_split_evenly_differs_by_at_most_one():
    assert [list(part) for part in split_evenly(range(7), 3)] == [[0, 1, 2], [3, 4], [5, 6]]
    assert [list(part) for part in split_evenly([1], 3)] == [[1], [], []]


def test_units_are_samples_or_whole_groups():
    samples = [make_sample(index=n, group_index=g) for n, g in enumerate([0, 0, 0, 1, 2, 2])]
    assert unit_spans("sample", samples) == [(n, n + 1) for n in range(6)]
    assert unit_spans("group", samples) == [(0, 3), (3, 4), (4, 6)]


def test_ranks_that_need_different_components_at_once_are_refused():
    units = units_of(4, 1)
    late = [[replace(pair, component="transformer_2") for pair in unit] for unit in units[2:]]
    mixed = [*units[:2], *late]
    build_shards(mixed, steps=2, micro_batch_size=1, ranks=2, rollout_id=0)
    with pytest.raises(
        BatchError, match=r"B13: in micro-batch 0 of optimizer step 0 .*transformer_2"
    ):
        build_shards(mixed, steps=1, micro_batch_size=2, ranks=2, rollout_id=0)

"""Batch arithmetic: units to windows to ranks to micro-batches, with filler of weight 0."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from drl.config.batch import batch_knobs
from drl.errors import BatchError
from drl.interfaces.family import Route
from drl.stages.pairs import (
    BatchPlan,
    batch_plan,
    build_shards,
    make_shards,
    split_evenly,
    unit_spans,
)
from drl.testing import make_pair, make_sample
from drl.types import Advantages, Group, Rollout, StepContext


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


def recipe_of(
    *,
    batch=1,
    count=2,
    ranks=1,
    steps=1,
    strategy="all",
    total=5,
    share=None,
    functions=(),
    **train,
):
    knobs = {
        "global_batch_size": None,
        "num_steps_per_rollout": None,
        "micro_batch_size": 1,
        "micro_batch_size_sample": None,
        "micro_batch_size_tstep": None,
        "iter_order": "sample_major",
        "dp_split_mode": "contiguous",
        "train_only": False,
    }
    chosen = dict.fromkeys(("custom_convert", "custom_expand"))
    return SimpleNamespace(
        rollout=SimpleNamespace(
            batch_size=batch, n_samples_per_prompt=count, **{**chosen, **dict(functions)}
        ),
        train=SimpleNamespace(**{**knobs, **train}),
        sde=SimpleNamespace(num_steps=steps, step_strategy=strategy),
        sampling=SimpleNamespace(num_steps=total),
        cluster=SimpleNamespace(actor_num_nodes=1, actor_num_gpus_per_node=ranks),
        step_share=share,
    )


def test_batch_plan_reads_the_recipe():
    recipe = recipe_of(
        batch=8,
        count=8,
        ranks=3,
        steps=3,
        strategy="sde_window",
        total=8,
        global_batch_size=32,
        micro_batch_size=16,
    )
    plan = batch_plan(recipe)
    # 32 samples on 3 ranks: 11 of 3 pairs on the fullest, in micro-batches of 16
    assert (plan.optimizer_steps, plan.pairs_per_step, plan.micro_batches) == (2, 96, 3)
    assert plan.ranks == 3
    assert "3 micro-batches of 16 pairs on each of 3 rank(s), 48 rows of filler" in plan.lines()


def test_the_plan_of_tiles_counts_tiles_not_pairs():
    # 6 samples of 4 steps in tiles of 4 x 3: two stretches of samples times two of steps
    recipe = recipe_of(
        batch=2, count=3, total=4, micro_batch_size_sample=4, micro_batch_size_tstep=3
    )
    plan = batch_plan(recipe)
    assert (plan.rows, plan.micro_batches, plan.filler) == (12, 4, 48 - 24)
    assert any(
        "4 micro-batches of 12 pairs (4 samples x 3 steps, sample_major)" in x for x in plan.lines()
    )
    (shard,) = build_shards(
        units_of(6, 4), steps=1, micro_batch_size=1, ranks=1, rollout_id=0, tile=plan.tile
    )
    assert [len(batch) for batch in shard.windows[0]] == [12] * plan.micro_batches
    # a tile never reaches beyond what there is
    whole = batch_plan(
        recipe_of(batch=2, count=3, total=4, micro_batch_size_sample=99, micro_batch_size_tstep=99)
    )
    assert (whole.rows, whole.micro_batches, whole.filler) == (24, 1, 0)


def test_the_plan_does_not_guess_the_pairs_of_a_function():
    (line,) = batch_plan(recipe_of(functions={"custom_expand": "acme:pairs"})).lines()
    assert line.endswith("in 1 optimizer step(s); rollout.custom_expand makes their pairs")
    both = {"custom_expand": "acme:pairs", "custom_convert": "acme:convert"}
    assert "rollout.custom_convert makes" in batch_plan(recipe_of(functions=both)).lines()[0]


def test_strategy_all_makes_every_denoising_step_a_pair():
    assert batch_plan(recipe_of(steps=2)).pairs_per_sample == 5
    assert batch_plan(recipe_of(steps=2, share=0.5)).pairs_per_sample == 2


class Steps:
    """A loss with a pair per trained step, which says in which window and with which advantage."""

    unit = "sample"

    def expand(self, unit, advantages, context):
        (sample,) = unit
        values = {"window": float(context.window), "advantage": (advantages or [0.0])[0]}
        return [make_pair(id=(sample.index, t), unit=sample.index, values=values) for t in (0, 1)]


def run_of(recipe, said):
    return SimpleNamespace(
        recipe=recipe,
        loss=Steps(),
        family=SimpleNamespace(components=("transformer",), route=lambda timestep: Route()),
        components={"transformer": None},
        functions={},
        ranks=recipe.cluster.actor_num_gpus_per_node,
        event=said.append,
        step_context=lambda rollout_id: StepContext(rollout_id=rollout_id),
    )


def rollout_of(count):
    samples = [make_sample(index=n, group_index=n) for n in range(count)]
    groups = [Group(group_index=s.group_index, prompt=s.prompt, samples=[s]) for s in samples]
    return Rollout(rollout_id=4, version=0, groups=groups)


def test_losses_expand_within_the_window_that_trains_the_pairs():
    said = []
    run = run_of(recipe_of(batch=2, count=2, num_steps_per_rollout=2), said)
    advantages = Advantages(values=torch.tensor([0.5, 1.5, 2.5, 3.5]))
    (shard,) = make_shards(run, rollout_of(4), advantages)
    for window, batches in enumerate(shard.windows):
        for pair in (pair for batch in batches for pair in batch):
            assert pair.values["window"] == window
            assert pair.values["advantage"] == pair.id[0] + 0.5
    assert shard.rollout_id == 4
    assert not said


def test_a_rollout_of_another_size_keeps_the_number_of_steps_and_says_so():
    said = []
    recipe = recipe_of(batch=2, count=2, num_steps_per_rollout=2, micro_batch_size=4)
    (shard,) = make_shards(run_of(recipe, said), rollout_of(3), None)
    assert shard.window_weights == [4.0, 2.0]
    assert said == [
        "the rollout has 3 samples instead of 4: the 2 optimizer steps share them evenly"
    ]


def test_units_of_a_function_are_shared_out_as_those_of_the_loss():
    run = run_of(recipe_of(batch=2, count=2, ranks=2, dp_split_mode="stride"), [])
    run.functions = {"rollout.custom_convert": lambda run, samples: units_of(5, 1)}
    shards = make_shards(run, rollout_of(4), None)
    assert [[p.id[0] for b in s.windows[0] for p in b if p.weight] for s in shards] == [
        [0, 2, 4],
        [1, 3],
    ]


def test_a_rollout_without_pairs_is_refused():
    run = run_of(recipe_of(), [])
    run.functions = {"rollout.custom_expand": lambda run, samples, advantages, rewards: [[], []]}
    with pytest.raises(BatchError, match="produced no pairs"):
        make_shards(run, rollout_of(2), None)


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


def test_split_evenly_differs_by_at_most_one():
    assert [list(part) for part in split_evenly(range(7), 3)] == [[0, 1, 2], [3, 4], [5, 6]]
    assert [list(part) for part in split_evenly([1], 3)] == [[1], [], []]


def test_units_are_samples_or_whole_groups():
    samples = [make_sample(index=n, group_index=g) for n, g in enumerate([0, 0, 0, 1, 2, 2])]
    assert unit_spans("sample", samples) == [(n, n + 1) for n in range(6)]
    assert unit_spans("group", samples) == [(0, 3), (3, 4), (4, 6)]

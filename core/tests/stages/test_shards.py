"""Windows of units on ranks and in micro-batches: flat and tiled, dealt both ways, filled up."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from drl.errors import BatchError
from drl.stages.shards import Layout, Tile, build_shards, deal, filled, lay_out, shards_of
from drl.testing import make_pair
from drl.types import Pair, Shard


def units_of(samples: int, steps: int) -> list[list[Pair]]:
    return [[make_pair(id=(s, t), unit=s) for t in range(steps)] for s in range(samples)]


def numbered(batches: list[tuple[Pair, ...]], steps: int) -> list[list[int]]:
    """Return the flat number of each pair of each micro-batch: sample x steps + step."""
    return [[pair.id[0] * steps + pair.id[1] for pair in batch] for batch in batches]


def counted(shards: list[Shard]) -> list[tuple[int, ...]]:
    return [
        pair.id
        for shard in shards
        for window in shard.windows
        for batch in window
        for pair in batch
        if pair.weight
    ]


@pytest.mark.parametrize(
    ("order", "expected"),
    [
        ("sample_major", [[0, 2], [4, 6], [1, 3], [5, 7]]),
        ("timestep_major", [[0, 2], [1, 3], [4, 6], [5, 7]]),
    ],
)
def test_the_worked_example_of_the_two_orders(order: str, expected: list[list[int]]) -> None:
    """4 samples of 2 steps in tiles of 2 x 1: sample_major has the steps outside, not inside."""
    layout = Layout(micro_batch_size=1, tile=Tile(samples=2, steps=1, order=order))
    (batches,) = lay_out(units_of(4, 2), layout)
    assert numbered(batches, 2) == expected


def test_inside_a_tile_a_samples_steps_stand_together() -> None:
    layout = Layout(micro_batch_size=1, tile=Tile(samples=2, steps=2))
    (batches,) = lay_out(units_of(2, 4), layout)
    assert numbered(batches, 4) == [[0, 1, 4, 5], [2, 3, 6, 7]]


def test_a_tile_of_one_step_and_every_sample_is_a_forward_at_one_noise_level() -> None:
    layout = Layout(micro_batch_size=7, tile=Tile(samples=8, steps=1))
    (batches,) = lay_out(units_of(3, 4), layout)
    assert [{pair.id[1] for pair in batch} for batch in batches] == [{0}, {1}, {2}, {3}]
    assert all(len(batch) == 3 for batch in batches), "S' = min(S, samples of the step)"


def test_tiles_of_samples_with_fewer_steps_are_filled_up() -> None:
    uneven = [*units_of(2, 3), [make_pair(id=(2, 0), unit=2)]]
    layout = Layout(micro_batch_size=1, tile=Tile(samples=2, steps=2, order="timestep_major"))
    (batches,) = lay_out(uneven, layout)
    assert [[p.id for p in batch if p.weight] for batch in batches] == [
        [(0, 0), (0, 1), (1, 0), (1, 1)],
        [(0, 2), (1, 2)],
        [(2, 0)],
    ]
    assert {len(batch) for batch in batches} == {4}, "a tile without any pair is left out"


def test_contiguous_ranks_get_neighbours_and_stride_deals_whole_samples() -> None:
    window = units_of(5, 2)
    near = deal(window, Layout(micro_batch_size=1, ranks=2))
    dealt = deal(window, Layout(micro_batch_size=1, ranks=2, split="stride"))
    assert [[unit[0].unit for unit in part] for part in near] == [[0, 1, 2], [3, 4]]
    assert [[unit[0].unit for unit in part] for part in dealt] == [[0, 2, 4], [1, 3]]
    assert all(len(unit) == 2 for part in dealt for unit in part), "pairs of a sample stay together"


def test_stride_keeps_windows_and_order_inside_a_rank() -> None:
    shards = build_shards(
        units_of(6, 2), steps=2, micro_batch_size=2, ranks=2, rollout_id=0, split="stride"
    )
    rows = [
        [[p.id[0] for batch in window for p in batch if p.weight] for window in shard.windows]
        for shard in shards
    ]
    assert rows == [[[0, 0, 2, 2], [3, 3, 5, 5]], [[1, 1], [4, 4]]]
    assert [len(window) for window in shards[1].windows] == [2, 2], "filler keeps ranks in step"


@given(
    samples=st.integers(1, 9),
    trained=st.integers(1, 4),
    tile=st.builds(
        Tile,
        samples=st.integers(1, 5),
        steps=st.integers(1, 5),
        order=st.sampled_from(["sample_major", "timestep_major"]),
    ),
    ranks=st.integers(1, 3),
    steps=st.integers(1, 3),
    split=st.sampled_from(["contiguous", "stride"]),
)
def test_every_pair_is_in_one_tile_of_one_rank(
    samples: int, trained: int, tile: Tile, ranks: int, steps: int, split: str
) -> None:
    shards = build_shards(
        units_of(samples, trained),
        steps=steps,
        micro_batch_size=1,
        ranks=ranks,
        rollout_id=0,
        split=split,
        tile=tile,
    )
    assert sorted(counted(shards)) == [(s, t) for s in range(samples) for t in range(trained)]
    assert len({tuple(len(window) for window in shard.windows) for shard in shards}) == 1
    for windows in zip(*(shard.windows for shard in shards), strict=True):
        assert len({len(batch) for window in windows for batch in window}) <= 1


def test_more_windows_than_units_leave_windows_of_weight_0() -> None:
    shards = build_shards(units_of(2, 1), steps=3, micro_batch_size=2, ranks=2, rollout_id=0)
    assert [shard.window_weights for shard in shards] == [[1.0, 1.0, 0]] * 2
    assert [len(shard.windows[2]) for shard in shards] == [0, 0]
    assert shards_of([[], []], Layout(micro_batch_size=1), 3)[0].windows == [[], []]


def test_filler_repeats_a_pair_with_weight_0() -> None:
    pairs = [make_pair(id=(n,)) for n in range(2)]
    batch = filled(pairs, pairs[1], 4)
    assert [p.id for p in batch] == [(0,), (1,), (1,), (1,)]
    assert [p.weight for p in batch] == [1.0, 1.0, 0.0, 0.0]
    assert batch[3].tensors is pairs[1].tensors, "no copy of latents"
    assert filled(pairs, pairs[1], 2) == tuple(pairs)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("where", ["tensors", "values"])
def test_a_failed_pair_that_is_not_finite_becomes_a_copy_of_one_that_counts(
    bad: float, where: str
) -> None:
    units = units_of(3, 2)
    broken = replace(units[1][1], weight=0.0)
    if where == "tensors":
        broken = replace(broken, tensors={n: t * bad for n, t in broken.tensors.items()})
    else:
        broken = replace(broken, values={**broken.values, "log_prob_old": bad})
    removed = replace(units[1][0], weight=0.0)
    units[1] = [removed, broken]
    (shard,) = build_shards(units, steps=1, micro_batch_size=6, ranks=1, rollout_id=0)
    ((batch,),) = shard.windows
    assert [pair.weight for pair in batch] == [1.0, 1.0, 0.0, 0.0, 1.0, 1.0]
    assert batch[2] is removed  # nothing is wrong with it
    assert batch[3] == replace(units[0][1], weight=0.0)
    assert shard.window_weights == [4.0]


def test_a_window_in_which_no_pair_counts_stays_as_it_is() -> None:
    nothing = {"values": {"log_prob_old": float("nan")}, "weight": 0.0}
    units = [[replace(pair, **nothing) for pair in unit] for unit in units_of(2, 2)]
    (shard,) = build_shards(units, steps=1, micro_batch_size=4, ranks=1, rollout_id=0)
    assert [pair for batch in shard.windows[0] for pair in batch] == [*units[0], *units[1]]


def two_phases(samples: int) -> list[list[Pair]]:
    """Units of a high-noise and a low-noise step."""
    return [[unit[0], replace(unit[1], component="transformer_2")] for unit in units_of(samples, 2)]


def test_filler_runs_the_component_that_the_other_ranks_run() -> None:
    """One sample on two ranks: the second only has filler, of both phases in their turn."""
    shards = build_shards(two_phases(1), steps=1, micro_batch_size=1, ranks=2, rollout_id=0)
    for shard in shards:
        assert [b[0].component for b in shard.windows[0]] == ["transformer", "transformer_2"]
    assert [p.weight for batch in shards[1].windows[0] for p in batch] == [0.0, 0.0]


def test_tiles_of_one_step_keep_phases_apart_on_uneven_ranks() -> None:
    tile = Tile(samples=2, steps=1)
    shards = build_shards(
        two_phases(5), steps=1, micro_batch_size=1, ranks=2, rollout_id=0, tile=tile
    )
    for shard in shards:
        phases = [{pair.component for pair in batch} for batch in shard.windows[0]]
        assert phases == [{"transformer"}] * 2 + [{"transformer_2"}] * 2


def test_ranks_that_need_different_components_at_once_are_refused() -> None:
    units = units_of(4, 1)
    late = [[replace(pair, component="transformer_2") for pair in unit] for unit in units[2:]]
    mixed = [*units[:2], *late]
    build_shards(mixed, steps=2, micro_batch_size=1, ranks=2, rollout_id=0)
    with pytest.raises(
        BatchError, match=r"B13: in micro-batch 0 of optimizer step 0 .*transformer_2"
    ):
        build_shards(mixed, steps=1, micro_batch_size=2, ranks=2, rollout_id=0)
    # dealt in turn, both ranks have the two phases in the same order
    build_shards(mixed, steps=1, micro_batch_size=1, ranks=2, rollout_id=0, split="stride")

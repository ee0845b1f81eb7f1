"""Windows of units to shards: which rank trains which pairs, and in which forward.

A micro-batch is a stretch of pairs, or a tile of units x steps. What does not fill one is filled up
with copies of weight 0, so every forward has the same shape and every rank the same number of them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from drl.errors import BatchError
from drl.types import Pair, Shard

Unit = Sequence[Pair]
"""The pairs of a sample, a group or a record, in the order of their steps."""

Batch = Sequence[Pair]
"""The pairs of one forward, before it is filled up."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Tile:
    """The pairs of one forward: ``steps`` pairs of each of ``samples`` units.

    ``order``: "sample_major" goes through all samples before the next steps, "timestep_major" through
    all steps before the next samples. Inside a tile a sample's pairs stand together.
    """

    samples: int
    steps: int
    order: str = "sample_major"

    def within(self, samples: int, steps: int) -> Tile:
        """Return the tile that does not reach beyond a rank's samples and a sample's steps."""
        return replace(
            self, samples=min(self.samples, max(1, samples)), steps=min(self.steps, max(1, steps))
        )

    @property
    def rows(self) -> int:
        """Pairs of a forward."""
        return self.samples * self.steps

    def count(self, samples: int, steps: int) -> int:
        """Return the tiles of a rank with this many samples of this many steps."""
        return -(-samples // self.samples) * -(-steps // self.steps)


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """How a window becomes micro-batches on ``ranks`` ranks; ``tile`` wins over ``micro_batch_size``."""

    micro_batch_size: int
    ranks: int = 1
    split: str = "contiguous"
    tile: Tile | None = None


def build_shards(
    units: Sequence[Unit],
    *,
    steps: int,
    micro_batch_size: int,
    ranks: int,
    rollout_id: int,
    split: str = "contiguous",
    tile: Tile | None = None,
) -> list[Shard]:
    """Split units into ``steps`` windows and lay these out; units never part across windows."""
    layout = Layout(micro_batch_size=micro_batch_size, ranks=ranks, split=split, tile=tile)
    return shards_of(split_evenly(units, steps), layout, rollout_id)


def shards_of(windows: Sequence[Sequence[Unit]], layout: Layout, rollout_id: int) -> list[Shard]:
    """Return one shard per rank; a window without any pair has no micro-batch."""
    weights = [sum(pair.weight for unit in window for pair in unit) for window in windows]
    laid_out = [lay_out(without_garbage(window), layout) for window in windows]
    check_aligned(laid_out)
    return [
        Shard(
            rollout_id=rollout_id,
            windows=[window[rank] for window in laid_out],
            window_weights=weights,
        )
        for rank in range(layout.ranks)
    ]


def without_garbage(window: Sequence[Unit]) -> Sequence[Unit]:
    """Return a window in which failed pairs that are not finite are copies, of weight 0, of pairs that count.

    A weight of 0 does not take NaN out of a sum, nor out of the gradients of shared weights. The copy is of the
    same component and shapes, and of the same place in its unit where there is one.
    """
    if all(pair.weight or is_finite(pair) for unit in window for pair in unit):
        return window
    sound: dict[Any, Pair] = {}
    for unit in window:
        for place, pair in enumerate(unit):
            if pair.weight:
                sound.setdefault((_form(pair), place), pair)
                sound.setdefault(_form(pair), pair)

    def mended(pair: Pair, place: int) -> Pair:
        if pair.weight or is_finite(pair):
            return pair
        model = sound.get((_form(pair), place)) or sound.get(_form(pair))
        return pair if model is None else replace(model, weight=0.0)

    return [[mended(pair, place) for place, pair in enumerate(unit)] for unit in window]


def is_finite(pair: Pair) -> bool:
    """Say whether all numbers of a pair are; waits for the device, so it is asked of pairs of weight 0 only."""
    values = all(math.isfinite(value) for value in pair.values.values())
    return values and all(bool(tensor.isfinite().all()) for tensor in pair.tensors.values())


def _form(pair: Pair) -> tuple[object, ...]:
    shapes = ((name, tuple(tensor.shape)) for name, tensor in pair.tensors.items())
    return pair.component, *shapes


def lay_out(window: Sequence[Unit], layout: Layout) -> list[list[tuple[Pair, ...]]]:
    """Return the micro-batches of each rank, equally many and equally large."""
    parts = deal(window, layout)
    if layout.tile is None:
        size = layout.micro_batch_size
        batches = [_flat(part, size) for part in parts]
    else:
        columns = max((len(unit) for unit in window), default=0)
        tile = layout.tile.within(max(len(part) for part in parts), columns)
        size = tile.rows
        across = max(-(-len(part) // tile.samples) for part in parts)
        batches = [_tiled(part, tile, across, columns) for part in parts]
    count = max(len(rows) for rows in batches)
    batches = [[*rows, *[()] * (count - len(rows))] for rows in batches]
    full: list[list[tuple[Pair, ...]]] = [[] for _ in parts]
    for column in zip(*batches, strict=True):
        present = [rows for rows in column if rows]
        if not present:
            continue  # a tile beyond the last sample, or one whose samples have no such step
        for rank, rows in enumerate(column):
            # the filler's component must be that of what the other ranks run at the same time
            full[rank].append(filled(rows, (rows or present[0])[-1], size))
    return full


def deal(window: Sequence[Unit], layout: Layout) -> list[Sequence[Unit]]:
    """Give each rank its units: neighbours, or every ``ranks``-th; shares differ by one at most.

    Neighbours let a micro-batch repeat an engine's batch row by row.
    """
    if layout.split == "stride":
        return [window[rank :: layout.ranks] for rank in range(layout.ranks)]
    return split_evenly(window, layout.ranks)


def _flat(part: Sequence[Unit], size: int) -> list[Batch]:
    rows = [pair for unit in part for pair in unit]
    return [rows[start : start + size] for start in range(0, len(rows), size)]


def _tiled(part: Sequence[Unit], tile: Tile, across: int, columns: int) -> list[Batch]:
    """Cut ``across`` stretches of units times the steps into tiles, in the order of the tile."""
    samples = [part[k * tile.samples : (k + 1) * tile.samples] for k in range(across)]
    starts = range(0, columns, tile.steps)
    if tile.order == "sample_major":
        visits = [(stretch, start) for start in starts for stretch in samples]
    else:
        visits = [(stretch, start) for stretch in samples for start in starts]
    return [
        [pair for unit in stretch for pair in unit[start : start + tile.steps]]
        for stretch, start in visits
    ]


def filled(rows: Batch, filler: Pair, size: int) -> tuple[Pair, ...]:
    """Return a micro-batch of ``size`` pairs; copies of ``filler`` have weight 0."""
    missing = size - len(rows)
    return (*rows, *[replace(filler, weight=0.0)] * missing)


def split_evenly(items: Sequence[Any], parts: int) -> list[Sequence[Any]]:
    """Split into contiguous parts whose lengths differ by at most one."""
    size, extra = divmod(len(items), parts)
    ends = [size * (k + 1) + min(k + 1, extra) for k in range(parts)]
    return [items[start:end] for start, end in zip([0, *ends[:-1]], ends, strict=True)]


def check_aligned(windows: Sequence[Sequence[Sequence[tuple[Pair, ...]]]]) -> None:
    """Raise BatchError (B13) unless all ranks run the same component at the same time.

    Each forward gathers weights from all ranks: ranks in different components would wait for ever.
    """
    for window, parts in enumerate(windows):
        for number, batches in enumerate(zip(*parts, strict=True)):
            components = [batch[0].component for batch in batches]
            if len(set(components)) > 1:
                raise BatchError(
                    f"B13: in micro-batch {number} of optimizer step {window} the ranks need different "
                    f"components: {components}; choose trained steps of one phase, or the same steps for "
                    "every sample (sde.step_strategy), or cluster.actor_num_gpus_per_node = 1"
                )

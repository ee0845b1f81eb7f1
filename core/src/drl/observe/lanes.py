"""When a run did what: ``timeline.jsonl``, arithmetic of time spans, and the picture of both as lanes.

A file of its own because a metric is one number: a row here holds the spans of one iteration.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from drl.observe.chart import Tick, label, ticks
from drl.observe.files import append_json_line, number, read_json_lines
from drl.observe.timing import Span, Timeline

FILE_NAME = "timeline.jsonl"
FINEST = 1e-3
"""Gaps below this share of an iteration are not kept: a picture cannot show them."""

SHOWN = 3
"""Iterations that the picture shows: the last ones."""

MOST_BLOCKS = 400
COLOURS = 8
WIDTH, LANE, TOP, FOOT = 760, 22, 12, 34
LEFT, RIGHT = 150, 748


def joined(spans: Sequence[Span], gap: float = 0.0) -> list[Span]:
    """Return the union of spans, ascending; neighbours up to ``gap`` seconds apart become one."""
    found: list[Span] = []
    for begin, end in sorted(spans):
        if found and begin <= found[-1][1] + gap:
            found[-1] = (found[-1][0], max(found[-1][1], end))
        else:
            found.append((begin, end))
    return found


def shared_seconds(one: Sequence[Span], other: Sequence[Span]) -> float:
    """Return how long both were going on."""
    return sum(
        max(0.0, min(end, last) - max(begin, first))
        for begin, end in joined(one)
        for first, last in joined(other)
    )


def record_timeline(folder: Path, rollout_id: int, timeline: Timeline) -> None:
    """Add the spans of one iteration to the run directory's timeline, in milliseconds' precision."""
    gap = FINEST * timeline.seconds
    row = {
        "step": rollout_id,
        "seconds": round(timeline.seconds, 4),
        "phases": _rounded(timeline.phases, gap),
        "beside": _rounded(timeline.beside, gap),
    }
    append_json_line(folder / FILE_NAME, row)


def _rounded(spans: Mapping[str, Sequence[Span]], gap: float) -> dict[str, list[list[float]]]:
    return {
        name: [[round(begin, 4), round(end, 4)] for begin, end in joined(found, gap)]
        for name, found in spans.items()
    }


def read_timelines(folder: Path) -> tuple[dict[int, Timeline], list[str]]:
    """Return the timelines of a run by iteration, ascending, and what could not be read.

    A resumed run may hold an iteration twice; the later one counts. A run without the file has none.
    """
    path = folder / FILE_NAME
    if not path.is_file():
        return {}, []
    rows, remarks = read_json_lines(path)
    found: dict[int, Timeline] = {}
    for row in rows:
        step, seconds = row.get("step"), number(row.get("seconds"))
        if not isinstance(step, int) or isinstance(step, bool) or seconds is None or seconds < 0:
            remarks.append(f"{path.name}: a row without step and seconds was left out")
            continue
        found[step] = Timeline(
            seconds=seconds, phases=_spans(row.get("phases")), beside=_spans(row.get("beside"))
        )
    return {step: found[step] for step in sorted(found)}, remarks


def _spans(value: Any) -> dict[str, tuple[Span, ...]]:
    if not isinstance(value, dict):
        return {}
    return {
        str(name): tuple(span for item in items if (span := _span(item)) is not None)
        for name, items in value.items()
        if isinstance(items, list)
    }


def _span(value: Any) -> Span | None:
    if not isinstance(value, list) or len(value) != 2:
        return None
    begin, end = number(value[0]), number(value[1])
    return None if begin is None or end is None or end < begin else (begin, end)


@dataclass(frozen=True, slots=True, kw_only=True)
class Block:
    """One stretch of work in the picture."""

    x: float
    width: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Lane:
    """One phase, or one kind of work beside the phases: its height in the picture and its blocks.

    ``kind``: number of its colour.
    """

    name: str
    y: float
    kind: int
    beside: bool
    blocks: tuple[Block, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Lanes:
    """The picture, in a box of ``width`` by ``height``. ``borders``: where iterations begin."""

    width: int
    height: float
    floor: float
    left: int = LEFT
    right: int = RIGHT
    lanes: tuple[Lane, ...]
    x_ticks: tuple[Tick, ...]
    borders: tuple[Tick, ...]


def draw_lanes(timelines: Mapping[int, Timeline], order: Sequence[str] = ()) -> Lanes | None:
    """Lay out the last iterations, one lane per phase in the order of their begin; None without any.

    Work beside the phases has its lanes below them. ``order``: names whose place gives their colour.
    """
    shown = list(timelines.items())[-SHOWN:]
    whole = sum(timeline.seconds for _, timeline in shown)
    if whole <= 0:
        return None
    starts, moment = [], 0.0
    for _, timeline in shown:
        starts.append(moment)
        moment += timeline.seconds
    scale = (RIGHT - LEFT) / whole
    lanes = _lanes([timeline for _, timeline in shown], starts, order, scale)
    marks = ticks(0.0, whole, 8)
    apart = marks[1] - marks[0] if len(marks) > 1 else 0.0
    floor = float(TOP + LANE * len(lanes))
    return Lanes(
        width=WIDTH,
        height=floor + FOOT,
        floor=floor,
        lanes=lanes,
        x_ticks=tuple(Tick(place=_place(mark, scale), label=label(mark, apart)) for mark in marks),
        borders=tuple(
            Tick(place=_place(start, scale), label=str(step + 1))
            for start, (step, _) in zip(starts, shown, strict=True)
        ),
    )


def _lanes(
    shown: Sequence[Timeline], starts: Sequence[float], order: Sequence[str], scale: float
) -> tuple[Lane, ...]:
    rows = [
        *((name, False, spans) for name, spans in _moved([t.phases for t in shown], starts)),
        *((name, True, spans) for name, spans in _moved([t.beside for t in shown], starts)),
    ]
    colours = list(dict.fromkeys([*order, *(name for name, _, _ in rows)]))
    whole = starts[-1] + shown[-1].seconds
    return tuple(
        Lane(
            name=name,
            y=TOP + LANE * number,
            kind=colours.index(name) % COLOURS,
            beside=beside,
            blocks=_blocks(spans, scale, whole),
        )
        for number, (name, beside, spans) in enumerate(rows)
    )


def _place(moment: float, scale: float) -> float:
    return round(LEFT + moment * scale, 1)


def _moved(
    found: Sequence[Mapping[str, Sequence[Span]]], starts: Sequence[float]
) -> list[tuple[str, list[Span]]]:
    """Return spans by name on one clock, names in the order of their first begin."""
    spans: dict[str, list[Span]] = {}
    for named, start in zip(found, starts, strict=True):
        for name, own in named.items():
            spans.setdefault(name, []).extend((start + begin, start + end) for begin, end in own)
    filled = [(name, own) for name, own in spans.items() if own]
    return sorted(filled, key=lambda item: min(item[1]))


def _blocks(spans: Sequence[Span], scale: float, whole: float) -> tuple[Block, ...]:
    """Return the blocks of a lane inside the box, none thinner than half a point."""
    kept = joined(spans, FINEST * whole)[:MOST_BLOCKS]
    return tuple(
        Block(
            x=_place(max(0.0, begin), scale),
            width=max(0.5, round((min(end, whole) - max(0.0, begin)) * scale, 1)),
        )
        for begin, end in kept
        if begin < whole and end > 0
    )

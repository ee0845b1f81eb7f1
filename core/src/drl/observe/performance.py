"""The figures of speed and memory as people read them: in the console, the report and ``drl bench``."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median

from drl.observe.chart import Series, label, line_chart
from drl.observe.curves import ITERATION, MOST_KINDS, Panel
from drl.observe.memory import memory_of
from drl.observe.metrics import Metrics


@dataclass(frozen=True, slots=True, kw_only=True)
class Shown:
    """A figure of speed: its metric, its name for people, and how a value is written."""

    metric: str
    title: str
    write: Callable[[float], str]


def plain_number(value: float) -> str:
    """Write a rate with three digits: 412, 6.93, 0.0412."""
    return f"{value:.0f}" if value >= 100 else f"{value:.3g}"


def share(value: float) -> str:
    """Write a share of 1 as a percentage."""
    return f"{100 * value:.1f} %"


def count(value: float) -> str:
    """Write a number of things."""
    return f"{value:.0f}"


SPEED = (
    Shown(metric="perf/images_per_second", title="images/s", write=plain_number),
    Shown(metric="perf/pairs_per_second", title="pairs/s", write=plain_number),
    Shown(metric="perf/rollout_tflops", title="TFLOP/s of the rollout", write=plain_number),
    Shown(metric="perf/train_tflops", title="TFLOP/s of training", write=plain_number),
    Shown(metric="perf/rollout_mfu", title="MFU of the rollout", write=share),
    Shown(metric="perf/train_mfu", title="MFU of training", write=share),
    Shown(metric="perf/driver_share", title="driver's share of the time", write=share),
    Shown(metric="perf/filler_rows", title="filler rows of training", write=count),
    Shown(metric="perf/rollout_filler_rows", title="filler rows of the rollout", write=count),
    Shown(metric="perf/recompilations", title="recompilations after warm-up", write=count),
)
"""In the order in which they are shown."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Figure:
    """One line of the table of speed: the median over iterations and the newest value, written out."""

    title: str
    median: str
    last: str


def settled(rows: Sequence[Mapping[str, float]]) -> list[Mapping[str, float]]:
    """Return the rows of iterations after the first, which warms up; the only one where there is one."""
    return list(rows[1:] or rows)


def medians(rows: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Return the median of every figure over the rows that have it."""
    names = dict.fromkeys(name for row in rows for name in row)
    return {name: median(row[name] for row in rows if name in row) for name in names}


def speed(metrics: Metrics) -> list[Figure]:
    """Return the figures of speed that a run has."""
    rows = [row for step, row in metrics.rows.items() if step >= 0]
    middle = medians(settled(rows))
    return [
        Figure(
            title=shown.title,
            median=shown.write(middle[shown.metric]),
            last=shown.write(metrics.series(shown.metric)[-1][1]),
        )
        for shown in SPEED
        if shown.metric in middle
    ]


def memory_panel(metrics: Metrics, order: Sequence[str]) -> Panel | None:
    """Return the chart of memory over the run, a line per phase: peaks, or else what it held at its end.

    ``order``: the phases as other charts show them, so that each keeps its colour.
    """
    for peak in (True, False):
        found = {step: memory_of(row, peak=peak) for step, row in metrics.rows.items()}
        if any(found.values()):
            return _memory_chart(found, order, peak=peak)
    return None


def _memory_chart(
    found: Mapping[int, Mapping[str, float]], order: Sequence[str], *, peak: bool
) -> Panel:
    names = dict.fromkeys(name for sizes in found.values() for name in sizes)
    ordered = [*(name for name in order if name in names), *(n for n in names if n not in order)]
    del ordered[MOST_KINDS:]
    lines = [
        Series(
            name=name,
            points=[(step + 1.0, sizes[name]) for step, sizes in found.items() if name in sizes],
        )
        for name in ordered
    ]
    newest = next(sizes for sizes in reversed(list(found.values())) if sizes)
    return Panel(
        title="Memory by phase",
        unit="GiB, most that was allocated in the phase" if peak else "GiB at the end of the phase",
        metric="perf/memory",
        last=label(round(max(newest.values()), 2)),
        charts=(line_chart(lines, ITERATION),),
        legend=tuple(ordered),
        note="of the GPU's allocator" if peak else "resident set of the process",
    )


def speed_words(values: Mapping[str, float]) -> list[str]:
    """Return the speed of one iteration in a few words: rates, utilisation, peak memory."""
    words = []
    for metric, unit in (
        ("perf/images_per_second", "images/s"),
        ("perf/pairs_per_second", "pairs/s"),
    ):
        if metric in values:
            words.append(f"{plain_number(values[metric])} {unit}")
    if "perf/train_mfu" in values:
        words.append(f"MFU {100 * values['perf/train_mfu']:.0f}%")
    peaks = memory_of(values, peak=True)
    if peaks:
        words.append(f"{max(peaks.values()):.1f} GiB")
    return words

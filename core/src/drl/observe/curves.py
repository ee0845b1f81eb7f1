"""Which figures the report draws, in which order, and the unit on each axis.

What a person needs to know first comes first: reward with its spread, then held-out reward. Values
are those of ``metrics.jsonl``, unchanged, and every chart names the figure it shows.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from drl.observe.chart import Chart, Series, bar_chart, label, line_chart
from drl.observe.metrics import Metrics
from drl.observe.timing import UNACCOUNTED, phases_of

ITERATION = "iteration"
"""Counted from 1, as in the console and in names of folders; ``step`` counts from 0. Before training: 0."""

IMAGES = "images seen"
REWARD = "rollout/reward/raw_mean"
ROLLOUT_SAMPLER = "rollout_sampler"
MOST_KINDS = 8
MOST_TERMS = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    """A chart to draw if its figure was logged; ``spread`` is the figure of its band."""

    metric: str
    title: str
    unit: str
    spread: str | None = None


FIRST = Wanted(
    metric=REWARD,
    title="Training reward",
    unit="reward, mean ± standard deviation over samples",
    spread="rollout/reward/raw_std",
)
LATER = (
    Wanted(metric="train/ratio_mean", title="Ratio", unit="new / old probability, mean over pairs"),
    Wanted(
        metric="train/ratio_abs_minus_1", title="Ratio from 1", unit="|ratio - 1|, mean over pairs"
    ),
    Wanted(metric="train/clipfrac", title="Clip share", unit="share of pairs (0 to 1)"),
    Wanted(metric="train/loss", title="Loss", unit="loss, mean over pairs"),
    Wanted(metric="train/grad_norm", title="Gradient norm", unit="L2 norm before clipping"),
    Wanted(metric="train/kl_loss", title="KL to the reference", unit="KL, mean over pairs"),
    Wanted(
        metric="train/log_prob_mean_abs_diff",
        title="Log-prob drift",
        unit="|new - old log-prob|, mean over pairs",
    ),
    Wanted(
        metric="rollout/informative_groups",
        title="Informative groups",
        unit="share of groups with a spread (0 to 1)",
    ),
    Wanted(metric="train/lr", title="Learning rate", unit="learning rate"),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Panel:
    """One chart over both axes. ``last`` is the newest value as logged, ``note`` e.g. the sampler."""

    title: str
    unit: str
    metric: str
    last: str
    charts: tuple[Chart, ...]
    legend: tuple[str, ...] = ()
    note: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class PhaseTime:
    """Seconds of one phase over the whole run and its share of the step time."""

    name: str
    seconds: float
    share: float


def panels(metrics: Metrics, samplers: Mapping[str, str]) -> list[Panel]:
    """Return the charts for which there are figures; ``samplers``: sentence by figure name.

    Each evaluation has a chart of its own, because other sampling makes other scores.
    """
    names = metrics.names()
    held_out = [
        Wanted(metric=name, title=f"Held-out reward: {name[5:]}", unit="reward, mean over samples")
        for name in evaluation_names(metrics)
    ]
    terms = [
        Wanted(metric=name, title=f"Reward term {match[1]}", unit="score, mean over samples")
        for name in names
        if (match := re.fullmatch(r"rollout/reward/(?!raw_|norm_|group_)(.+)_mean", name))
    ]
    shown = [FIRST, *held_out, *(terms[:MOST_TERMS] if len(terms) > 1 else []), *LATER]
    found = [_panel(metrics, wanted, samplers.get(wanted.metric, "")) for wanted in shown]
    return [panel for panel in found if panel is not None]


def evaluation_names(metrics: Metrics) -> list[str]:
    """Return the mean of each set under each sampler: ``eval/<set>``, ``eval/<set>/rollout_sampler``."""
    pattern = re.compile(rf"eval/(?!step$)[^/]+(/{ROLLOUT_SAMPLER})?")
    return [name for name in metrics.names() if pattern.fullmatch(name)]


def _panel(metrics: Metrics, wanted: Wanted, note: str) -> Panel | None:
    lines = _lines(metrics, wanted)
    if not lines:
        return None
    spread = dict(metrics.series(wanted.spread)) if wanted.spread else {}
    sparse = wanted.metric.startswith("eval/")
    charts = [
        _chart(lines, spread, {step: step + 1.0 for step in metrics.rows}, ITERATION, dots=sparse)
    ]
    seen = metrics.images_seen()
    if any(seen.values()):
        charts.append(_chart(lines, spread, seen, IMAGES, dots=sparse))
    newest = next(iter(lines.values()))[-1][1]
    return Panel(
        title=wanted.title,
        unit=wanted.unit,
        metric=wanted.metric,
        last=label(newest),
        charts=tuple(charts),
        legend=tuple(lines) if len(lines) > 1 else (),
        note=note,
    )


def _lines(metrics: Metrics, wanted: Wanted) -> dict[str, list[tuple[int, float]]]:
    """Return the figure itself, or its lines per inner update (``<metric>_update_<k>``) instead."""
    pattern = re.compile(re.escape(wanted.metric) + r"_update_(\d{1,4})")
    updates = [match for name in metrics.names() if (match := pattern.fullmatch(name))]
    if len(updates) > 1:
        return {f"update {match[1]}": metrics.series(match[0]) for match in updates[:MOST_KINDS]}
    own = metrics.series(wanted.metric)
    return {wanted.title: own} if own else {}


def _chart(
    lines: Mapping[str, Sequence[tuple[int, float]]],
    spread: Mapping[int, float],
    place: Mapping[int, float],
    x_label: str,
    *,
    dots: bool,
) -> Chart:
    series = [
        Series(
            name=name,
            points=[(place[step], value) for step, value in points],
            spread={place[step]: spread[step] for step, _ in points if step in spread},
            dots=dots,
        )
        for name, points in lines.items()
    ]
    return line_chart(series, x_label)


def phase_times(metrics: Metrics) -> tuple[list[PhaseTime], Chart | None]:
    """Return the time of each phase, longest first, and the stacked chart in the same order.

    ``unaccounted`` is what no phase claims. Past eight kinds the shortest are joined as ``other``.
    """
    spent = {step: times for step, row in metrics.rows.items() if (times := _times(row))}
    totals: dict[str, float] = {}
    for times in spent.values():
        for name, seconds in times.items():
            totals[name] = totals.get(name, 0.0) + seconds
    whole = sum(totals.values())
    if whole <= 0:
        return [], None
    ordered = sorted(totals, key=lambda name: -totals[name])
    kept = ordered if len(ordered) <= MOST_KINDS else ordered[: MOST_KINDS - 1]
    rest = ordered[len(kept) :]
    columns = [[name] for name in kept] + ([rest] if rest else [])
    stacks = [
        (step + 1.0, [sum(times.get(name, 0.0) for name in names) for names in columns])
        for step, times in spent.items()
    ]
    table = []
    for names in columns:
        seconds = sum(totals[name] for name in names)
        title = names[0] if names != rest else "other"
        table.append(PhaseTime(name=title, seconds=seconds, share=seconds / whole))
    return table, bar_chart(stacks, ITERATION)


def _times(row: Mapping[str, float]) -> dict[str, float]:
    times = phases_of(row)
    if times and row.get(UNACCOUNTED, 0.0) > 0:
        times["unaccounted"] = row[UNACCOUNTED]
    return times

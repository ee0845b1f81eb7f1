#!/usr/bin/env python3
"""Draw the rollout rewards of several runs into one SVG: tools/reward_curves.py NAME=RUN ... --out FILE.

A point is the mean over the samples of an iteration, averaged over the iterations around it; the first
and the last have too few around them and are left out.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path

from drl.observe.chart import BOTTOM, LEFT, RIGHT, TOP, Chart, Series, line_chart
from drl.observe.metrics import read_metrics

FIGURE = "rollout/reward/raw_mean"
COLOURS = ("#3b6fb6", "#c0504d", "#4f9d4f", "#8064a2", "#d08a2e", "#3a9aa5", "#7a7a7a")
LEGEND = 14
"""Height of one row of the legend."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Write the drawing; exit code 2 when a run has no rewards to draw."""
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("runs", nargs="+", metavar="NAME=RUN")
    parser.add_argument("--out", type=Path, required=True, help="the SVG file")
    parser.add_argument("--half", type=int, default=5, help="iterations averaged on either side")
    given = parser.parse_args(arguments)
    curves: dict[str, list[tuple[float, float]]] = {}
    for run in given.runs:
        name, _, path = run.partition("=")
        rewards = Path(path) / "metrics.jsonl"
        points = read_metrics(rewards).series(FIGURE) if rewards.is_file() else []
        if not points:
            print(f"{run}: no {FIGURE} in {rewards}; give NAME=RUN_DIRECTORY", file=sys.stderr)
            return 2
        curves[name] = smooth([(float(step + 1), value) for step, value in points], given.half)
    given.out.write_text(drawing(curves))
    return 0


def smooth(points: Sequence[tuple[float, float]], half: int) -> list[tuple[float, float]]:
    """Return the mean of the points up to ``half`` places away, where there are as many on both sides."""
    reach = min(half, (len(points) - 1) // 2)
    return [
        (
            points[place][0],
            sum(y for _, y in points[place - reach : place + reach + 1]) / (2 * reach + 1),
        )
        for place in range(reach, len(points) - reach)
    ]


def drawing(curves: Mapping[str, Sequence[tuple[float, float]]]) -> str:
    """Return the SVG: grid, lines, and a legend below."""
    series = [Series(name=name, points=points) for name, points in curves.items()]
    chart = line_chart(series, "iteration")
    rows = [*grid(chart), *lines(chart)]
    height = BOTTOM + 34 + LEGEND * len(series)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {RIGHT + 12} {height}" width="720" '
        f'font-family="system-ui, sans-serif" font-size="9">\n'
        f'<rect width="{RIGHT + 12}" height="{height}" fill="#fff"/>\n'
        + "\n".join(rows)
        + "\n</svg>\n"
    )


def grid(chart: Chart) -> list[str]:
    """Return the ticks of both axes."""
    rows = []
    for tick in chart.y_ticks:
        rows += [
            f'<path d="M{LEFT} {tick.place}H{RIGHT}" stroke="#ddd" stroke-width=".6"/>',
            f'<text x="{LEFT - 4}" y="{tick.place + 3}" text-anchor="end">{tick.label}</text>',
        ]
    for tick in chart.x_ticks:
        rows += [
            f'<path d="M{tick.place} {TOP}V{BOTTOM}" stroke="#eee" stroke-width=".6"/>',
            f'<text x="{tick.place}" y="{BOTTOM + 11}" text-anchor="middle">{tick.label}</text>',
        ]
    middle = (LEFT + RIGHT) / 2
    label = f'<text x="{middle}" y="{BOTTOM + 22}" text-anchor="middle">{chart.x_label}</text>'
    return [*rows, label]


def lines(chart: Chart) -> list[str]:
    """Return each line with its row of the legend."""
    rows = []
    for number, line in enumerate(chart.lines):
        colour, y = COLOURS[number % len(COLOURS)], BOTTOM + 34 + LEGEND * number
        rows += [
            f'<polyline points="{line.line}" fill="none" stroke="{colour}" stroke-width="1.2"/>',
            f'<path d="M{LEFT} {y - 3}h14" stroke="{colour}" stroke-width="2"/>',
            f'<text x="{LEFT + 19}" y="{y}">{escape(line.name)}</text>',
        ]
    return rows


if __name__ == "__main__":
    sys.exit(main())

"""Charts as one picture that stands alone: an SVG file with its own colours, light on white.

The report draws the same charts inside its page; a file has no page to take colours from.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from html import escape

from drl.observe.chart import HEIGHT, LEFT, RIGHT, WIDTH, Chart

COLOURS = ("#2563eb", "#dc2626", "#059669", "#9333ea", "#d97706", "#0891b2", "#be185d", "#4d7c0f")
TITLE_HEIGHT = 24
GAP = 14
TEXT = 'font-family="system-ui, sans-serif" font-size="10"'

Titled = tuple[str, Chart, Sequence[str]]
"""A title, a chart of lines, and the names of its lines."""


def drawn(charts: Sequence[Titled]) -> str:
    """Return an SVG file with the charts below each other, each with its title and legend."""
    step = HEIGHT + TITLE_HEIGHT + GAP
    height = max(step * len(charts), 1)
    body = [
        f'<g transform="translate(0 {number * step + GAP})">{"".join(_chart(*titled))}</g>'
        for number, titled in enumerate(charts)
    ]
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" width="{2 * WIDTH}" '
        f'height="{2 * height}" role="img">\n<rect width="{WIDTH}" height="{height}" fill="#ffffff"/>\n'
        + "\n".join(body)
        + "\n</svg>\n"
    )


def _chart(title: str, chart: Chart, names: Sequence[str]) -> Iterator[str]:
    yield _text(LEFT, 8, title, weight="600")
    place = LEFT
    for number, name in enumerate(names):
        colour = COLOURS[number % len(COLOURS)]
        yield f'<rect x="{place}" y="14" width="8" height="8" fill="{colour}"/>'
        yield _text(place + 11, 21, name)
        place += 22 + 6 * len(name)
    yield f'<g transform="translate(0 {TITLE_HEIGHT})">'
    for tick in chart.y_ticks:
        yield (
            f'<line x1="{LEFT}" x2="{RIGHT}" y1="{tick.place}" y2="{tick.place}" stroke="#e4e4e7"/>'
        )
        yield _text(LEFT - 5, tick.place + 3, tick.label, anchor="end")
    for tick in chart.x_ticks:
        yield _text(tick.place, 172, tick.label, anchor="middle")
    yield _text((LEFT + RIGHT) / 2, 187, chart.x_label, anchor="middle")
    for number, line in enumerate(chart.lines):
        colour = COLOURS[number % len(COLOURS)]
        yield f'<polyline points="{line.line}" fill="none" stroke="{colour}" stroke-width="1.7"/>'
        for x, y in line.dots:
            yield f'<circle cx="{x}" cy="{y}" r="2.5" fill="{colour}"/>'
    yield "</g>"


def _text(x: float, y: float, text: str, *, anchor: str = "start", weight: str = "400") -> str:
    return (
        f'<text x="{x:g}" y="{y:g}" {TEXT} font-weight="{weight}" fill="#3f3f46" '
        f'text-anchor="{anchor}">{escape(text)}</text>'
    )

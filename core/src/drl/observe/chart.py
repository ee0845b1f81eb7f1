"""Geometry of the report's charts: points in, coordinates and ticks out; the template draws.

Drawn by hand because a chart here is a polyline, a band and eight labels: an SVG of a plotting
library is five times larger, has fixed colours (the report follows light and dark), and would bring
65 MB of packages into core.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

WIDTH, HEIGHT = 360, 190
LEFT, RIGHT, TOP, BOTTOM = 50, 350, 8, 158
MOST_POINTS = 240
MOST_BARS = 60
SMALLEST_SPAN = 1e-300
"""Below it a fifth of a span has no power of ten any more; it is drawn as a constant."""

Point = tuple[float, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class Series:
    """One line: ``points`` (x, y) ascending in x; ``spread`` is the half width of its band per x."""

    name: str
    points: Sequence[Point]
    spread: Mapping[float, float] = field(default_factory=dict)
    dots: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Tick:
    """A grid line: its place in the drawing and its label."""

    place: float
    label: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """A drawn series: coordinates of the line, of the closed band, and of single dots."""

    name: str
    line: str
    band: str
    dots: tuple[Point, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Bar:
    """One piece of a stacked bar; ``kind`` is the number of its phase."""

    x: float
    y: float
    width: float
    height: float
    kind: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Chart:
    """A chart ready to draw in a box of 360 by 190."""

    x_label: str
    x_ticks: tuple[Tick, ...]
    y_ticks: tuple[Tick, ...]
    lines: tuple[Line, ...] = ()
    bars: tuple[Bar, ...] = ()


def ticks(low: float, high: float, wanted: int = 5, *, whole: bool = False) -> list[float]:
    """Return round numbers (1, 2 or 5 times a power of ten apart) inside [low, high]; ``whole``: no fractions."""
    if not high - low >= SMALLEST_SPAN:
        return [low]
    raw = max((high - low) / wanted, 1.0 if whole else 0.0)
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(power * factor for factor in (1, 2, 5, 10) if power * factor >= raw * 0.999)
    first = math.ceil(low / step - 1e-9)
    last = math.floor(high / step + 1e-9)
    return [number * step for number in range(first, last + 1)] or [low]


def label(value: float, step: float = 0.0) -> str:
    """Write a number short, with the digits that neighbours ``step`` apart need to differ."""
    largest = max(abs(value), step)
    if largest >= 1e6 or 0 < largest < 1e-4:
        return f"{value:.4g}".replace("e-0", "e-").replace("e+0", "e").replace("e+", "e")
    if step <= 0:
        return f"{value:.6g}"
    return f"{value:.{max(0, -math.floor(math.log10(step) + 1e-9))}f}"


def thin(points: Sequence[Point], most: int = MOST_POINTS) -> list[Point]:
    """Keep the lowest and the highest point of each stretch, so that spikes survive."""
    if len(points) <= most:
        return list(points)
    stretches = most // 2
    kept: list[Point] = []
    for number in range(stretches):
        part = points[len(points) * number // stretches : len(points) * (number + 1) // stretches]
        kept += sorted({min(part, key=lambda p: p[1]), max(part, key=lambda p: p[1])})
    return [points[0], *kept, points[-1]] if kept[0] != points[0] else [*kept, points[-1]]


def line_chart(series: Sequence[Series], x_label: str) -> Chart:
    """Lay out lines with bands over what is counted; one value alone is a dot."""
    xs = [x for one in series for x, _ in one.points]
    ys = [edge for one in series for x, y in one.points for edge in _edges(one, x, y)]
    x_low, x_high = min(xs), max(xs)
    y_low, y_high = _padded(min(ys), max(ys))
    place_x, place_y = _scale(x_low, x_high, LEFT, RIGHT), _scale(y_low, y_high, BOTTOM, TOP)
    return Chart(
        x_label=x_label,
        x_ticks=_ticks(x_low, x_high, place_x, whole=True),
        y_ticks=_ticks(y_low, y_high, place_y),
        lines=tuple(_line(one, place_x, place_y) for one in series),
    )


def bar_chart(stacks: Sequence[tuple[float, Sequence[float]]], x_label: str) -> Chart:
    """Lay out stacked bars; ``stacks`` holds x and the piece heights, which many x share by mean."""
    grouped = _averaged(stacks)
    x_low, x_high = stacks[0][0], stacks[-1][0]
    high = max(sum(pieces) for _, pieces in grouped) or 1.0
    place_y = _scale(0.0, high, BOTTOM, TOP)
    slot = (RIGHT - LEFT) / len(grouped)
    bars = []
    for number, (_, pieces) in enumerate(grouped):
        floor = 0.0
        for kind, piece in enumerate(pieces):
            top, bottom = place_y(floor + piece), place_y(floor)
            x = round(LEFT + slot * (number + 0.1), 1)
            bars.append(
                Bar(
                    x=x, y=top, width=round(slot * 0.8, 1), height=round(bottom - top, 1), kind=kind
                )
            )
            floor += piece
    half = slot / 2
    place_x = _scale(x_low, x_high, LEFT + half, RIGHT - half)
    return Chart(
        x_label=x_label,
        x_ticks=_ticks(x_low, x_high, place_x, whole=True),
        y_ticks=_ticks(0.0, high, place_y),
        bars=tuple(bar for bar in bars if bar.height > 0),
    )


def _averaged(
    stacks: Sequence[tuple[float, Sequence[float]]],
) -> list[tuple[float, list[float]]]:
    """Join neighbours until at most ``MOST_BARS`` are left."""
    count = min(len(stacks), MOST_BARS)
    joined = []
    for number in range(count):
        part = stacks[len(stacks) * number // count : len(stacks) * (number + 1) // count]
        means = [sum(column) / len(part) for column in zip(*(p for _, p in part), strict=True)]
        joined.append((part[0][0], means))
    return joined


def _edges(one: Series, x: float, y: float) -> tuple[float, float]:
    half = one.spread.get(x, 0.0)
    return y - half, y + half


def _padded(low: float, high: float) -> tuple[float, float]:
    """Leave some air, but none below 0 for what is never negative; a constant gets its own size."""
    if high > low:
        air = 0.04 * (high - low)
        return (0.0 if 0 <= low < air else low - air), high + air
    air = abs(low) * 0.5 or 1.0
    return low - air, high + air


def _scale(low: float, high: float, start: float, stop: float) -> Callable[[float], float]:
    if not high > low:
        return lambda value: round((start + stop) / 2, 1)
    return lambda value: round(start + (value - low) / (high - low) * (stop - start), 1)


def _ticks(
    low: float, high: float, place: Callable[[float], float], *, whole: bool = False
) -> tuple[Tick, ...]:
    found = ticks(low, high, whole=whole)
    step = found[1] - found[0] if len(found) > 1 else 0.0
    return tuple(Tick(place=place(value), label=label(value, step)) for value in found)


def _line(
    one: Series, place_x: Callable[[float], float], place_y: Callable[[float], float]
) -> Line:
    points = thin(one.points)
    drawn = [(place_x(x), place_y(y)) for x, y in points]
    band = ""
    if one.spread:
        edges = [(place_x(x), *map(place_y, _edges(one, x, y))) for x, y in points]
        upper = [(x, high) for x, _, high in edges]
        band = _coordinates([*upper, *((x, low) for x, low, _ in reversed(edges))])
    dots = tuple(drawn) if one.dots or len(drawn) == 1 else ()
    return Line(name=one.name, line=_coordinates(drawn), band=band, dots=dots)


def _coordinates(points: Sequence[Point]) -> str:
    return " ".join(f"{x:g},{y:g}" for x, y in points)

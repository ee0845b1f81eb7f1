"""How cost grows: the same bench with one option at several values, and how far from a line that lies."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from drl.bench.measure import WORK, Bench, Wanted
from drl.errors import BadInput
from drl.plan.rates import Observation, fit


@dataclass(frozen=True, slots=True, kw_only=True)
class Varied:
    """An option and the values that it is benched with, as TOML text."""

    key: str
    values: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Growth:
    """One value of a varied option: its bench, and how far off the line it is.

    ``off``: by phase, the relative deviation of the seconds from the line ``fixed + slope * work`` through
    all values; empty where no line can be judged: with fewer than three different amounts of work.
    """

    value: str
    bench: Bench
    off: Mapping[str, float]


def varied(text: str) -> Varied:
    """Read ``KEY=V1,V2,...``; commas inside brackets or quotes belong to a value. BadInput otherwise."""
    key, equals, rest = text.partition("=")
    values = tuple(value.strip() for value in _split(rest))
    if not key.strip() or not equals or len(values) < 2 or not all(values):
        raise BadInput(
            f"--vary {text}: give an option and at least two values, such as "
            "--vary rollout.batch_size=2,8,32"
        )
    return Varied(key=key.strip(), values=values)


def _split(text: str) -> list[str]:
    parts, depth, quote = [""], 0, ""
    for letter in text:
        if quote:
            quote = "" if letter == quote else quote
        elif letter in "\"'":
            quote = letter
        elif letter in "[{":
            depth += 1
        elif letter in "]}":
            depth -= 1
        elif letter == "," and depth == 0:
            parts.append("")
            continue
        parts[-1] += letter
    return parts


def each_value(option: Varied, wanted: Wanted) -> list[Wanted]:
    """Return a bench per value, after one another; a chosen run directory gets one folder per value."""
    return [
        replace(
            wanted,
            sets=(*wanted.sets, f"{option.key}={value}"),
            run_dir=None if wanted.run_dir is None else wanted.run_dir / f"{number}",
        )
        for number, value in enumerate(option.values)
    ]


def growths(option: Varied, benches: Sequence[Bench]) -> list[Growth]:
    """Return the first values with their deviations from the line through all of them: one per bench."""
    deviations = {
        phase: _deviations(
            [bench.work.get(phase) for bench in benches],
            [bench.seconds.get(phase) for bench in benches],
        )
        for phase in WORK
    }
    return [
        Growth(
            value=value,
            bench=bench,
            off={phase: offs[number] for phase, offs in deviations.items() if offs},
        )
        for number, (value, bench) in enumerate(zip(option.values, benches, strict=False))
    ]


def _deviations(work: Sequence[float | None], seconds: Sequence[float | None]) -> list[float]:
    """Return (measured - line) / line per value; [] with fewer than three different amounts of work."""
    pairs = [
        (amount, spent)
        for amount, spent in zip(work, seconds, strict=True)
        if amount is not None and spent is not None
    ]
    if len(pairs) < len(work) or len({amount for amount, _ in pairs}) < 3:
        return []
    line = fit([Observation(kind="growth", work=amount, value=spent) for amount, spent in pairs])
    return [spent / line(work=amount) - 1 for amount, spent in pairs]

"""A bench as rows of text, for a terminal, and as plain values, for a file."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from drl.bench.growth import Growth
from drl.bench.measure import ITERATION, REWARD, ROLLOUT, WAIT, Bench
from drl.observe.performance import SPEED, plain_number
from drl.observe.timing import STEP_TIME, TRAIN, phases_of

UNKNOWN = "–"
Row = tuple[str, ...]
TITLES = {REWARD: "rewards, beside the rollout", WAIT: "waited for rewards"}


def phase_rows(bench: Bench) -> list[Row]:
    """Return per phase: its median seconds, from which to which they were, their share, memory in GiB.

    Phases that only the first iteration had (compiling, warm-up) are not among them. Rewards come below the
    iteration, since they are no part of its sum.
    """
    step = bench.step_seconds
    rows: list[Row] = []
    for name, seconds in sorted(bench.seconds.items(), key=lambda item: -item[1]):
        share = f"{100 * seconds / step:.1f} %" if step > 0 else UNKNOWN
        words = (seconds_words(seconds), range_words(bench, name), share, memory_words(bench, name))
        rows.append((name, *words))
    whole = {ITERATION: step} | bench.beside
    rows += [
        (TITLES.get(name, name), seconds_words(seconds), range_words(bench, name), "", "")
        for name, seconds in whole.items()
    ]
    return rows


def range_words(bench: Bench, phase: str) -> str:
    """Return how long a phase took in the fastest and in the slowest iteration."""
    if phase not in bench.ranges:
        return UNKNOWN
    return " – ".join(seconds_words(seconds).removesuffix(" s") for seconds in bench.ranges[phase])


def memory_words(bench: Bench, phase: str) -> str:
    """Return the peak of a phase, or what was held at its end where the device tells no peak."""
    found = bench.peaks or bench.held
    return f"{found[phase]:.2f}" if phase in found else UNKNOWN


def memory_title(bench: Bench) -> str:
    """Return what the figures of memory are."""
    return "peak GiB" if bench.peaks else "resident GiB"


def seconds_words(seconds: float) -> str:
    """Write seconds with the digits that matter: 12.3 s, 0.081 s."""
    return f"{seconds:.1f} s" if seconds >= 10 else f"{seconds:.3f} s"


def speed_rows(bench: Bench) -> list[Row]:
    """Return the rates by name; MFU and TFLOP/s say what they lack where they are unknown."""
    rows: list[Row] = [
        (shown.title, shown.write(bench.middle[shown.metric]))
        for shown in SPEED
        if shown.metric in bench.middle
    ]
    if "perf/train_tflops" not in bench.middle and TRAIN in bench.seconds:
        counts = "perf/rollout_tflops" in bench.middle
        title = "TFLOP/s of training" if counts else "TFLOP/s"
        what = "such a backward pass" if counts else "its work"
        rows.append((title, f"{UNKNOWN} (the model family does not count {what})"))
    elif "perf/train_mfu" not in bench.middle:
        rows.append(("MFU", f"{UNKNOWN} (no published peak for {bench.host.device})"))
    return rows


def head_lines(bench: Bench) -> list[str]:
    """Return what the figures are about: where, how many iterations, what the first one cost."""
    host = bench.host
    compiled = "compiled blocks" if host.compiled else "eager blocks"
    first = bench.first[STEP_TIME]
    return [
        f"{bench.name} on {host.device}, torch {host.torch}, {host.dtype}, {compiled}",
        f"start {seconds_words(bench.start_seconds)}, first iteration {seconds_words(first)} (compiles and "
        f"warms up), then medians of {bench.iterations}",
    ]


GROWTH_TITLES = ("seconds", "from – to", "each", "off the line", "memory GiB")
"""Titles behind the value of a varied option and what the phase makes or takes."""

COUNTED = {ROLLOUT: "images", TRAIN: "pairs"}


def growth_rows(growths: Sequence[Growth], phase: str) -> list[Row]:
    """Return per value: the work of a phase, its seconds, their range, seconds each, deviation, memory.

    No rows for a phase that was not measured.
    """
    return [
        _growth_row(growth, phase)
        for growth in growths
        if phase in growth.bench.seconds and phase in growth.bench.work
    ]


def _growth_row(growth: Growth, phase: str) -> Row:
    bench = growth.bench
    seconds, work = bench.seconds[phase], bench.work[phase]
    off = growth.off.get(phase)
    return (
        growth.value,
        f"{work:.0f}",
        seconds_words(seconds),
        range_words(bench, phase),
        f"{1000 * seconds / work:.4g} ms" if work else UNKNOWN,
        UNKNOWN if off is None else f"{100 * off:+.1f} %",
        memory_words(bench, phase),
    )


def compared_rows(
    bench: Bench, seconds: Mapping[str, float] | None, peak_bytes: Mapping[str, int]
) -> list[Row]:
    """Return a plan's prediction beside the measurement, with its error, per phase and figure."""
    rows: list[Row] = []
    for phase, planned in (seconds or {}).items():
        if bench.seconds.get(phase):
            rows.append(_compared(f"{phase}, seconds", planned, bench.seconds[phase]))
    for phase, size in peak_bytes.items():
        if phase in bench.peaks:
            rows.append(_compared(f"{phase}, peak GiB", size / 2**30, bench.peaks[phase]))
    return rows


def _compared(title: str, planned: float, measured: float) -> Row:
    error = f"{100 * (planned / measured - 1):+.1f} %" if measured else UNKNOWN
    return title, plain_number(planned), plain_number(measured), error


def as_json(bench: Bench) -> dict[str, Any]:
    """Return a bench as plain values."""
    return {
        "name": bench.name,
        "device": bench.host.device,
        "torch": bench.host.torch,
        "dtype": bench.host.dtype,
        "compiled": bench.host.compiled,
        "iterations": bench.iterations,
        "start_seconds": bench.start_seconds,
        "seconds": bench.seconds,
        "step_seconds": bench.step_seconds,
        "seconds_range": {phase: list(both) for phase, both in bench.ranges.items()},
        "beside": bench.beside,
        "work": dict(bench.work),
        "peak_gib": dict(bench.peaks),
        "held_gib": dict(bench.held),
        "speed": {s.metric: bench.middle[s.metric] for s in SPEED if s.metric in bench.middle},
        "first": {"step_seconds": bench.first[STEP_TIME], "seconds": phases_of(bench.first)},
    }


def growth_json(growths: Sequence[Growth]) -> list[dict[str, Any]]:
    """Return the rows of a varied option as plain values."""
    return [
        {
            "value": growth.value,
            "off": dict(growth.off),
            **as_json(growth.bench),
        }
        for growth in growths
    ]

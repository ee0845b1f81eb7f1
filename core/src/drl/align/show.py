"""What a probe found: as text, and as ``align.json``, ``align.csv`` and ``align.svg``."""

from __future__ import annotations

import csv
import io
import math
import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import asdict, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from drl.align.changes import Finding, causes_among
from drl.align.measure import StepFigures
from drl.observe.chart import Series, line_chart
from drl.observe.files import write_json_atomic, write_text_atomic
from drl.observe.svg import drawn

if TYPE_CHECKING:
    from drl.align.probe import Alignment

CURVES = (
    ("|Δ log-prob| between trainer and engine", ("log_prob_mean", "log_prob_max")),
    ("|ratio - 1| before any optimizer step", ("ratio_mean", "ratio_max")),
    ("|Δ model output|", ("output_mean", "output_max")),
)
"""Title of each chart, and the two figures in it: mean and largest."""


def lines(found: Alignment) -> Iterator[str]:
    """Yield the report for a terminal of 100 columns."""
    yield from headline(found)
    yield from step_table(found.steps)
    yield ""
    yield conclusion(found)
    for text in found.other_settings:
        yield ""
        yield from text.splitlines()
    if found.rows:
        yield ""
        yield from rows_table(found)
    if found.findings:
        yield ""
        yield from findings_table(found.findings)


def headline(found: Alignment) -> Iterator[str]:
    """Say what was compared."""
    facts = found.facts
    guided = facts["guidance_scale"]
    how = "one forward" if facts["batched_guidance"] else "two forwards"
    yield (
        f"{facts['name']}: {facts['family']} + {facts['loss']} + {facts['sde']}, engine {facts['engine']}, "
        f"{facts['forward_dtype']} on {facts['device']}"
    )
    yield (
        f"  {'no guidance' if guided is None else f'guidance {guided:g} in {how}'}; "
        f"{found.pairs} pairs in micro-batches of {facts['micro_batch_size']}; "
        + ("full weights" if facts["lora"] is None else f"adapters start {facts['lora']}")
    )
    yield ""


def step_table(steps: Sequence[StepFigures]) -> Iterator[str]:
    """Yield a line per denoising step."""
    yield "              |Δ log-prob|          |ratio - 1|           |Δ model output|"
    yield "step  sigma   mean       max        mean       max        mean       max        relative  pairs"
    for one in steps:
        figures = [number(value) for value in _figures(one)]
        yield (
            f"{one.step:>4}  {one.sigma:<6.4f}  "
            + "  ".join(f"{text:<9}" for text in figures)
            + f" {one.pairs}"
        )


def _figures(one: StepFigures) -> list[float]:
    return [
        one.log_prob_mean,
        one.log_prob_max,
        one.ratio_mean,
        one.ratio_max,
        one.output_mean,
        one.output_max,
        one.output_rel,
    ]


def number(value: float) -> str:
    """Write a difference; nothing but equality is written as 0."""
    if math.isnan(value):
        return "nan"
    return "0.0" if value == 0 else f"{value:.2e}"


def conclusion(found: Alignment) -> str:
    """Say in one sentence how well rollout and trainer agree."""
    if found.exact:
        return f"exactly 0.0 at every step: rollout and trainer agree to the bit on {found.pairs} pairs"
    relation = "within" if found.within else "ABOVE"
    return (
        f"|Δ log-prob| mean {number(found.mean)}, max {number(found.max)}: {relation} "
        f"trust.max_log_prob_diff = {found.limit:.1e}"
    )


def rows_table(found: Alignment) -> Iterator[str]:
    """Yield how the number of rows of a forward moves the log-probs."""
    yield "rows of a forward   |Δ log-prob| mean   max         spread against the smallest"
    if found.facts["dropout"]:
        yield "(in evaluation mode: each number of rows would draw dropout masks of its own)"
    for one in found.rows:
        yield f"{one.rows:>17}   {number(one.mean):<18}  {number(one.max):<10}  {number(one.spread)}"
    spread = max((one.spread for one in found.rows), default=0.0)
    if spread > found.limit:
        yield f"the rows alone move log-probs by {number(spread)}, more than trust.max_log_prob_diff allows:"
        yield "keep train.micro_batch_size and the engine's rows equal"


def findings_table(findings: Sequence[Finding]) -> Iterator[str]:
    """Yield the causes, then everything that was tried."""
    causes = causes_among(findings)
    if not causes:
        yield "cause: unknown; none of the changes below removes the difference"
    for one in causes:
        part = "" if one.verdict == "cause" else " (of a part)"
        yield f"cause{part}: {one.name}" + "".join(f", on top of {name}" for name in one.on_top_of)
        yield from textwrap.wrap(one.meaning, 96, initial_indent="  ", subsequent_indent="  ")
    yield ""
    yield "the trainer's forward with one change at a time   |Δ log-prob| mean   max"
    for one in findings:
        figures = f"{number(one.mean):<18}  {number(one.max):<9}  {WORDS.get(one.verdict, '')}"
        yield f"  {one.name:<47} {WITHOUT_FIGURES.get(one.verdict, figures)}".rstrip()
        if one.verdict == "untried":
            yield from textwrap.wrap(
                one.meaning, 96, initial_indent="    ", subsequent_indent="    "
            )


WORDS = {"cause": "removes it", "part": "removes a part"}
WITHOUT_FIGURES = {"failed": "cannot run here", "untried": "not tried"}


def write(found: Alignment, folder: Path) -> list[Path]:
    """Write the three files into a folder, the one that others read last; returns their paths."""
    files = results_of(folder)
    write_text_atomic(files[1], as_csv(found.steps))
    write_text_atomic(files[2], as_svg(found))
    write_json_atomic(files[0], as_json(found))
    return files


def results_of(folder: Path) -> list[Path]:
    """Return where a probe's results lie."""
    return [folder / name for name in ("align.json", "align.csv", "align.svg")]


def as_json(found: Alignment) -> dict[str, Any]:
    """Return everything that was found as plain values; NaN and infinity as None."""
    return {
        "facts": plain(dict(found.facts)),
        "pairs": found.pairs,
        "log_prob_mean_abs_diff": plain(found.mean),
        "log_prob_max_abs_diff": plain(found.max),
        "limit": found.limit,
        "within": found.within,
        "exact": found.exact,
        "steps": [plain(asdict(one)) for one in found.steps],
        "rows": [plain(asdict(one)) for one in found.rows],
        "causes": [one.name for one in causes_among(found.findings)],
        "changes": [plain(asdict(one)) for one in found.findings],
        "other_settings": list(found.other_settings),
    }


def plain(value: Any) -> Any:
    """Return a value that JSON can hold."""
    if isinstance(value, dict):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    return value if isinstance(value, str | int | bool | None) else str(value)


def as_csv(steps: Sequence[StepFigures]) -> str:
    """Return the table of the steps as CSV."""
    text = io.StringIO()
    names = [field.name for field in fields(StepFigures)]
    writer = csv.DictWriter(text, names, lineterminator="\n")
    writer.writeheader()
    writer.writerows(asdict(one) for one in steps)
    return text.getvalue()


def as_svg(found: Alignment) -> str:
    """Draw mean and largest differences over the denoising steps; what is not finite is left out."""
    charts = []
    for title, names in CURVES:
        series = [
            Series(name=label, points=points, dots=True)
            for label, name in zip(("mean", "max"), names, strict=True)
            if (points := _points(found.steps, name))
        ]
        if series:
            charts.append((title, line_chart(series, "denoising step"), [s.name for s in series]))
    return drawn(charts)


def _points(steps: Sequence[StepFigures], name: str) -> list[tuple[float, float]]:
    values = [(float(one.step), float(asdict(one)[name])) for one in steps]
    return [(x, y) for x, y in values if math.isfinite(y)]

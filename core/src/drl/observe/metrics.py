"""Reading ``metrics.jsonl``: figures per iteration, and the sums that a whole run has.

A resumed run may hold an iteration twice; the later row wins, key by key. Figures are passed on as
they were logged, in their own units.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from drl.observe.files import number, read_json_lines
from drl.observe.timing import EVALUATION, STEP_TIME, phase_key

IMAGES_SEEN = "rollout/images_seen"
VALID_SAMPLES = "rollout/reward/raw_num_samples"
FAILED_SAMPLES = "rollout/reward/failed"
LARGEST_STEP = 10**12


@dataclass(frozen=True, slots=True, kw_only=True)
class Metrics:
    """Figures by iteration (rollout id), ascending. ``remarks``: what could not be read."""

    rows: Mapping[int, Mapping[str, float]] = field(default_factory=dict)
    remarks: tuple[str, ...] = ()

    def series(self, name: str) -> list[tuple[int, float]]:
        """Return (iteration, value) wherever the figure was logged."""
        return [(step, row[name]) for step, row in self.rows.items() if name in row]

    def names(self) -> list[str]:
        """Return every figure's name once, in the order of its first appearance."""
        return list(dict.fromkeys(name for row in self.rows.values() for name in row))

    def images_seen(self) -> dict[int, float]:
        """Return per iteration how many samples were made up to its end, failed ones included.

        Read from ``rollout/images_seen``; a row without it adds its own samples to the last count.
        """
        seen, total = {}, 0.0
        for step, row in self.rows.items():
            made = row.get(VALID_SAMPLES, 0.0) + row.get(FAILED_SAMPLES, 0.0)
            total = row.get(IMAGES_SEEN, total + made)
            seen[step] = total
        return seen

    def train_seconds(self) -> float:
        """Return the time of all iterations without evaluations, also of a run that was resumed."""
        evaluation = phase_key(EVALUATION)
        return sum(row.get(STEP_TIME, 0.0) - row.get(evaluation, 0.0) for row in self.rows.values())


def read_metrics(path: Path) -> Metrics:
    """Read a metrics file; rows that are torn or have no step are named in ``remarks``."""
    rows, remarks = read_json_lines(path)
    return merge_rows(rows, remarks, path.name)


def merge_rows(rows: Iterable[Mapping[str, Any]], remarks: Iterable[str], source: str) -> Metrics:
    """Merge the rows of one iteration; figures that are not finite numbers are counted and dropped."""
    merged: dict[int, dict[str, float]] = {}
    problems = list(remarks)
    dropped: dict[str, int] = {}
    for row in rows:
        step = row.get("step")
        if not isinstance(step, int) or isinstance(step, bool) or abs(step) > LARGEST_STEP:
            problems.append(f"{source}: a row without a whole step number was left out")
            continue
        figures = merged.setdefault(step, {})
        for name, value in row.items():
            if name in ("step", "time"):
                continue
            figure = number(value)
            if figure is not None:
                figures[name] = figure
            else:
                dropped[name] = dropped.get(name, 0) + 1
    problems += [
        f"{source}: {count} of the values of {name} are no finite numbers"
        for name, count in dropped.items()
    ]
    ordered = {step: merged[step] for step in sorted(merged)}
    return Metrics(rows=ordered, remarks=tuple(problems))

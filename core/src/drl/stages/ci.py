"""The check of a run's evaluations for continuous integration (``[debug.ci]``)."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from drl.errors import CheckFailed

if TYPE_CHECKING:
    from drl.run import Run


def check_evaluations(run: Run) -> str | None:
    """Return a line about a check that passed, None when none was asked for; raises CheckFailed.

    Looks at every evaluation of the run, those before a resume too.
    """
    options = run.recipe.debug.ci
    if not options.enabled:
        return None
    found = {label: figures.get(options.metric_key) for label, figures in evaluations_of(run)}
    return verdict(found, options.metric_key, options.metric_threshold)


def evaluations_of(run: Run) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Yield label and figures of every evaluation that the run has written, in the order of iterations."""
    tables = [
        (file, json.loads(file.read_text("utf-8"))) for file in run.evaluations.glob("*.json")
    ]
    for file, table in sorted(tables, key=in_order):
        means = {f"eval/{name}": mean for name, mean in table["means"].items()}
        yield file.stem, means | table["metrics"]


def in_order(entry: tuple[Path, Mapping[str, Any]]) -> tuple[int, str]:
    """Sort by iterations done."""
    return int(entry[1]["rollout_id"]), entry[0].stem


def verdict(found: Mapping[str, float | None], key: str, threshold: float) -> str:
    """Return what was reached; CheckFailed when a value is missing or none reaches the threshold."""
    lines = "\n".join(f"  {label}: {value}" for label, value in found.items())
    if not found:
        raise CheckFailed(f"debug.ci: {key} cannot be checked: the run evaluated nothing")
    values = {label: value for label, value in found.items() if value is not None}
    missing = [label for label in found if label not in values or math.isnan(values[label])]
    if missing:
        raise CheckFailed(
            f"debug.ci: evaluation {missing[0]} has no value of {key}; every evaluation must\n{lines}"
        )
    best = max(values, key=lambda label: values[label])
    if values[best] < threshold:
        raise CheckFailed(
            f"debug.ci: {key} reached {values[best]:.6g}, and debug.ci.metric_threshold is "
            f"{threshold:.6g}\n{lines}"
        )
    return f"debug.ci: {key} {values[best]:.6g} in evaluation {best}, at least {threshold:.6g}"

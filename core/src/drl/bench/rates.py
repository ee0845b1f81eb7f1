"""A bench and the planner: its prediction before, and what the bench teaches it after."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from drl.bench.measure import Bench
from drl.observe.timing import phases_of
from drl.plan.record import Measured, record_run

if TYPE_CHECKING:
    from drl.plan.predict import Prediction

GIB = 2**30


def record(prediction: Prediction, bench: Bench) -> Path | None:
    """Add what a bench measured to the user's rates of this card; return their file, None if it has nothing new."""
    measured = Measured(
        seconds=phases_of(bench.middle),
        iteration_s=bench.step_seconds,
        peak_bytes={phase: int(size * GIB) for phase, size in bench.peaks.items()},
        source=f"drl bench {bench.name}",
    )
    return record_run(prediction, measured)

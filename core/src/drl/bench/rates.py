"""A bench and the planner: its prediction before, and what the bench teaches it after."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from drl.bench.measure import ROLLOUT, WAIT, Bench
from drl.observe.timing import phases_of
from drl.plan.record import Measured, record_run

if TYPE_CHECKING:
    from drl.plan.predict import Prediction

GIB = 2**30


def record(prediction: Prediction, bench: Bench) -> Path | None:
    """Add what a bench measured to the user's rates of this card; return their file, None if it has nothing new.

    Without what the rollout waited for rewards, which is no rate of the card.
    """
    seconds = phases_of(bench.middle)
    waited = min(bench.beside.get(WAIT, 0.0), seconds.get(ROLLOUT, 0.0))
    if waited:
        seconds[ROLLOUT] -= waited
    measured = Measured(
        seconds=seconds,
        iteration_s=bench.step_seconds - waited,
        peak_bytes={phase: int(size * GIB) for phase, size in bench.peaks.items()},
        source=f"drl bench {bench.name}",
    )
    return record_run(prediction, measured)

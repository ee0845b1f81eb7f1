"""The reward of a bench: numbers that differ within a group and cost nothing."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from drl.types import Sample

if TYPE_CHECKING:
    from drl.run import Run

NAME = "drl.bench.rewards:synthetic"
STEPS = 8191


async def synthetic(run: Run, samples: Sequence[Sample]) -> list[float]:
    """Return a number in [0, 1) per sample, from its seed and member: no picture is looked at."""
    return [(sample.seed * 31 + sample.member * 127) % STEPS / STEPS for sample in samples]

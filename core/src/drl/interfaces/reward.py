"""``Reward``: scores of samples."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from drl.types import Context, Sample, Score


@dataclass(frozen=True, slots=True, kw_only=True)
class Workers:
    """Where a reward runs. ``processes`` 0: in the driver, for rewards that cost next to nothing."""

    processes: int = 1
    gpus: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Golden:
    """Two samples that must score in this order before a run starts, at least ``margin`` apart."""

    good: Sample
    bad: Sample
    margin: float = 0.0


class Reward(ABC):
    """A scorer of samples. ``context.section`` is the recipe's ``[reward]``."""

    wants_groups: bool = False
    media: frozenset[str] = frozenset({"image"})

    def __init__(self, options: Any, context: Context) -> None:
        self.options = options
        self.context = context

    def workers(self) -> Workers:
        """Return where this reward wants to run; one spawned CPU process by default."""
        return Workers()

    async def start(self) -> None:
        """Load models; called once, in the process that will score."""
        return

    @abstractmethod
    async def score(self, samples: Sequence[Sample]) -> Sequence[Score]:
        """Return one score per sample in the same order; samples stay unchanged.

        Only ``prompt``, ``media``, ``seed``, ``index``, ``group_index`` and ``member`` are set.
        """

    def golden(self) -> Golden | None:
        """Return a pair that must score in order before a run starts, or None."""
        return None

    async def close(self) -> None:
        """Free what ``start`` took; a second call is harmless."""
        return

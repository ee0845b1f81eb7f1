"""``Logger``: where figures and pictures of a run go."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from drl.types import EMPTY, Context, Sample

if TYPE_CHECKING:
    from pathlib import Path


@dataclass(frozen=True, slots=True, kw_only=True)
class RunFacts:
    """What a logger may know of the run; ``recipe`` is resolved and holds no secrets.

    ``total``: number of iterations; ``first``: the id of the first one (above 0 on resume).
    """

    name: str
    run_dir: Path
    recipe: Mapping[str, Any]
    first: int
    total: int
    plan: Mapping[str, Any] = EMPTY


class Logger(ABC):
    """A sink of metrics. ``context.section`` is the recipe's ``[logging]``."""

    def __init__(self, options: Any, context: Context) -> None:
        self.options = options
        self.context = context

    @abstractmethod
    def start(self, run: RunFacts) -> None:
        """Open the sink."""

    def phase(self, rollout_id: int, name: str, done: int, total: int) -> None:
        """Progress inside an iteration (``rollout`` 3 of 8 groups …); ignored by default."""
        return

    @abstractmethod
    def metrics(self, step: int, values: Mapping[str, float]) -> None:
        """Take the figures of one iteration; ``step`` is the rollout id."""

    def samples(self, step: int, samples: Sequence[Sample]) -> None:
        """Take some samples of one iteration; ignored by default."""
        return

    def event(self, text: str) -> None:
        """Take one line that a person should read (saved, resumed, evaluated); ignored by default."""
        return

    @abstractmethod
    def close(self) -> None:
        """Flush and close; a second call is harmless."""

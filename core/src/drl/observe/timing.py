"""``Phases``: where the time of an iteration goes.

Time is charged to the innermost open phase and to nothing else, so the phases of an iteration and
``unaccounted`` add up to its step time exactly. Work that runs beside a phase (rewards scored while
the next group is generated) is booked by ``overlap`` under its own name, outside that sum. Memory is
read where one phase ends and another begins.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from drl.observe.memory import PhaseMemory

Span = tuple[float, float]
"""Begin and end, in seconds."""

TRAIN = "train"
EVALUATION = "eval"
STEP_TIME = "perf/step_time"
UNACCOUNTED = "perf/unaccounted_time"
TRAIN_WAIT = "perf/train_wait_time"


def phase_key(name: str) -> str:
    """Return the metric name of a phase."""
    return f"perf/{name}_time"


@dataclass(frozen=True, slots=True, kw_only=True)
class Timeline:
    """When an iteration did what, in seconds since its begin: ``phases``, and what ran ``beside`` them."""

    seconds: float
    phases: Mapping[str, Sequence[Span]] = field(default_factory=dict)
    beside: Mapping[str, Sequence[Span]] = field(default_factory=dict)


class Phases:
    """Timers of the phases of one iteration after another; ``clock`` counts seconds.

    An iteration begins where the one before was finished (the first where the object is made), so
    no time between iterations is lost. ``memory`` is charged beside the clock; ``timeline`` is that of
    the iteration that was finished last, ``failed`` the innermost phase that an error came out of.
    """

    def __init__(
        self,
        clock: Callable[[], float] = time.perf_counter,
        memory: PhaseMemory | None = None,
    ) -> None:
        self._clock = clock
        self._memory = memory
        self.timeline = Timeline(seconds=0.0)
        self.failed: str | None = None
        self._open: list[str] = []
        self._totals: dict[str, float] = {}
        self.start()

    def start(self) -> None:
        """Begin an iteration now and forget what was measured since the last ``finish``."""
        self._spent: dict[str, float] = {}
        self._beside: dict[str, float] = {}
        self._spans: dict[str, list[Span]] = {}
        self._beside_spans: dict[str, list[Span]] = {}
        self._unaccounted = 0.0
        if self._memory is not None:
            self._memory.start()
        self._began = self._mark = self._clock()

    @property
    def current(self) -> str | None:
        """Name of the innermost open phase."""
        return self._open[-1] if self._open else None

    @property
    def totals(self) -> Mapping[str, float]:
        """Seconds per phase over all finished iterations; ``step`` is all of them together."""
        return dict(self._totals)

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Charge the time inside to ``name``; a phase inside another pauses the outer one."""
        depth = len(self._open)
        self._charge()
        self._open.append(name)
        try:
            yield
        except BaseException:
            self.failed = self.failed or name  # the innermost one is left first
            raise
        finally:
            self._charge()
            if len(self._open) != depth + 1 or self._open[-1] != name:
                raise RuntimeError(
                    f"phase {name!r} ended while {self._open} were open: phases nest; "
                    "book work that runs beside a phase with overlap()"
                )
            self._open.pop()

    def overlap(self, name: str, seconds: float, spans: Sequence[Span] = ()) -> None:
        """Book work that ran beside the phases, under ``perf/overlapped/<name>_time``.

        ``spans``: when it did, by this object's own clock, where that is known.
        """
        self._beside[name] = self._beside.get(name, 0.0) + seconds
        self._beside_spans.setdefault(name, []).extend(spans)

    def finish(self) -> dict[str, float]:
        """End the iteration, begin the next, and return its figures in seconds by metric name.

        With a ``train`` phase also the wait of the trainer: ``perf/train_wait_time`` (all that is not
        training) and ``perf/wait_time_ratio``; memory as ``PhaseMemory.finish`` gives it. RuntimeError
        when a phase is still open.
        """
        if self._open:
            raise RuntimeError(f"phases {self._open} are still open at the end of the iteration")
        self._charge()
        step = self._mark - self._began
        figures = {phase_key(name): seconds for name, seconds in self._spent.items()}
        figures |= {phase_key(f"overlapped/{name}"): took for name, took in self._beside.items()}
        figures |= {UNACCOUNTED: self._unaccounted, STEP_TIME: step}
        if TRAIN in self._spent:
            wait = step - self._spent[TRAIN]
            figures |= {TRAIN_WAIT: wait, "perf/wait_time_ratio": wait / step if step > 0 else 0.0}
        for name, seconds in [*self._spent.items(), ("step", step)]:
            self._totals[name] = self._totals.get(name, 0.0) + seconds
        if self._memory is not None:
            figures |= self._memory.finish()
        self.timeline = Timeline(
            seconds=step,
            phases=since(self._began, self._spans),
            beside=since(self._began, self._beside_spans),
        )
        mark = self._mark
        self.start()
        self._began = self._mark = mark
        return figures

    def _charge(self) -> None:
        """Give the time since the last mark to whoever was running."""
        now = self._clock()
        began, self._mark = self._mark, now
        if self._open:
            name = self._open[-1]
            self._spent[name] = self._spent.get(name, 0.0) + (now - began)
            self._spans.setdefault(name, []).append((began, now))
        else:
            self._unaccounted += now - began
        if self._memory is not None:
            self._memory.charge(self.current)


def since(moment: float, spans: Mapping[str, Sequence[Span]]) -> dict[str, tuple[Span, ...]]:
    """Return spans in seconds since a moment, by name; names without any are left out."""
    return {
        name: tuple((begin - moment, end - moment) for begin, end in found)
        for name, found in spans.items()
        if found
    }


def phases_of(figures: Mapping[str, float]) -> dict[str, float]:
    """Return the seconds per phase of one row of metrics, by phase name, without sums and overlaps."""
    left_out = {STEP_TIME, UNACCOUNTED, TRAIN_WAIT}
    return {
        key.removeprefix("perf/").removesuffix("_time"): seconds
        for key, seconds in figures.items()
        if key.startswith("perf/")
        and key.endswith("_time")
        and key.count("/") == 1
        and key not in left_out
    }

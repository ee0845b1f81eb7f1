"""The console's live view, drawn with rich; imported only when there is a terminal."""

from __future__ import annotations

import atexit
from collections import deque
from threading import RLock
from typing import TextIO

from rich.console import Console
from rich.live import Live
from rich.text import Text

from drl.builtin.console_facts import (
    Progress,
    duration,
    estimate,
    evaluations,
    learning,
    seconds,
    sparkline,
)
from drl.observe.performance import speed_words

BAR_WIDTH = 30
EVENTS = 3


class LiveView:
    """Draws a run at the bottom of the terminal; what is printed meanwhile stands above it.

    ``lock`` guards ``progress``, which the drawing thread reads. The terminal is restored by
    ``close`` and, when nobody calls it, at the end of the process.
    """

    def __init__(
        self, name: str, progress: Progress, lock: RLock, stream: TextIO, refresh_per_second: float
    ) -> None:
        self.name = name
        self.progress = progress
        self.lock = lock
        self.events: deque[str] = deque(maxlen=EVENTS)
        self.live = Live(
            get_renderable=self._view,
            console=Console(file=stream),
            refresh_per_second=refresh_per_second,
        )
        atexit.register(self.close)
        self.live.start()

    def finished(self) -> None:
        """Draw the figures of an iteration that ended."""
        self.live.refresh()

    def event(self, text: str) -> None:
        """Add a line below the figures; the oldest one moves up into the scroll-back."""
        with self.lock:
            oldest = self.events[0] if len(self.events) == EVENTS else None
            self.events.append(text)
        if oldest is not None:
            self.live.console.print(Text(oldest))
        self.live.refresh()

    def close(self) -> None:
        """Draw once more and give the terminal back."""
        atexit.unregister(self.close)
        self.live.stop()

    def _view(self) -> Text:
        with self.lock:
            return view(self.name, self.progress, list(self.events))


def view(name: str, progress: Progress, events: list[str]) -> Text:
    """Return the whole view: where the run is, what it does now, what it learned, last events."""
    lines = [
        _head(name, progress),
        _phase(progress),
        _learned(progress),
        _dim(_timing(progress)),
        *(Text(event) for event in events),
    ]
    return Text("\n").join(line for line in lines if line.plain)


def _head(name: str, progress: Progress) -> Text:
    share = progress.step / progress.total if progress.total else 1.0
    filled = min(BAR_WIDTH, int(share * BAR_WIDTH))
    number = min(progress.step + 1, progress.total)
    return Text.assemble(
        (name, "bold"),
        f"  iteration {number}/{progress.total}  ",
        ("━" * filled, "green"),
        ("━" * (BAR_WIDTH - filled), "dim"),
        f"  {estimate(progress)}",
    )


def _phase(progress: Progress) -> Text:
    phase = progress.phase
    if phase is None:
        return Text("")
    count = f"  {phase.done}/{phase.total}" if phase.total else ""
    return Text(f"{phase.name}{count}  {duration(progress.clock() - phase.started)}", "cyan")


def _learned(progress: Progress) -> Text:
    facts = [*learning(progress.values), *evaluations(progress.values)]
    return Text.assemble("  ".join(facts), "  ", (sparkline(progress.rewards), "green"))


def _timing(progress: Progress) -> str:
    facts = [seconds(progress.values), *speed_words(progress.values)]
    return "  ".join(fact for fact in facts if fact)


def _dim(text: str) -> Text:
    return Text(text, "dim")

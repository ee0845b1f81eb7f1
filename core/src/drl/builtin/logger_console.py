"""``ConsoleLogger``: a run as a person watches it, live in a terminal, as plain lines elsewhere."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Mapping
from threading import RLock
from typing import TYPE_CHECKING, TextIO

from drl.builtin.config_loggers import ConsoleOptions
from drl.builtin.console_facts import Progress, iteration_line
from drl.interfaces.logger import Logger, RunFacts
from drl.types import Context

if TYPE_CHECKING:
    from drl.builtin.console_live import LiveView


class ConsoleLogger(Logger):
    """Writes to standard output as it is when the run starts."""

    def __init__(self, options: ConsoleOptions, context: Context) -> None:
        super().__init__(options, context)
        self._lock = RLock()  # a signal handler may log while the lock is held
        self._progress = Progress(first=0, total=0, clock=time.monotonic)
        self._stream: TextIO = sys.stdout
        self._live: LiveView | None = None

    def start(self, run: RunFacts) -> None:
        """Open the live view when there is a terminal for it."""
        self._stream = sys.stdout
        self._progress = Progress(first=run.first, total=run.total, clock=time.monotonic)
        if self.options.live and is_terminal(self._stream):
            self._live = self._open_live(run.name)

    def phase(self, rollout_id: int, name: str, done: int, total: int) -> None:
        """Show what the iteration is doing; plain lines leave it out."""
        with self._lock:
            self._progress.enter(rollout_id, name, done, total)

    def metrics(self, step: int, values: Mapping[str, float]) -> None:
        """Show the figures of an iteration; what comes before the first one was an event already."""
        if step < self._progress.first:
            return
        with self._lock:
            self._progress.finish(step, values)
            line = iteration_line(self._progress)
        if self._live is None:
            self._print(line)
        else:
            self._live.finished()

    def event(self, text: str) -> None:
        """Show one line."""
        if self._live is None:
            self._print(text)
        else:
            self._live.event(text)

    def close(self) -> None:
        """Give the terminal back."""
        live, self._live = self._live, None
        if live is not None:
            live.close()

    def _open_live(self, name: str) -> LiveView | None:
        try:
            from drl.builtin.console_live import LiveView
        except ImportError:  # rich is not a dependency of core
            return None
        rate = self.options.refresh_per_second
        return LiveView(name, self._progress, self._lock, self._stream, rate)

    def _print(self, text: str) -> None:
        encoding = self._stream.encoding or "utf-8"
        self._stream.write(text.encode(encoding, "replace").decode(encoding) + "\n")
        self._stream.flush()


def is_terminal(stream: TextIO) -> bool:
    """True for a terminal that can redraw lines and show the characters of the live view."""
    encoding = (stream.encoding or "").lower().replace("-", "")
    return (
        stream.isatty() and os.environ.get("TERM") not in {"dumb", "unknown"} and encoding == "utf8"
    )

"""Ctrl-C and SIGTERM: finish the iteration and save first."""

from __future__ import annotations

import signal
from collections.abc import Callable
from types import FrameType, TracebackType
from typing import Any, Self


class StopFlag:
    """Ctrl-C or SIGTERM once: finish the iteration and save. A second time: stop at once."""

    def __init__(self) -> None:
        self.asked = False
        self.reason = ""
        self._before: dict[int, Any] = {}
        self._say: Callable[[str], None] = print

    def install(self, say: Callable[[str], None]) -> None:
        """Take over the signals, from the main thread; ``say`` tells the user what happens."""
        self._say = say
        for number in (signal.SIGINT, signal.SIGTERM):
            self._before[number] = signal.signal(number, self._signalled)

    def uninstall(self) -> None:
        """Give the signals back to whoever had them."""
        for number, handler in self._before.items():
            signal.signal(number, handler)
        self._before = {}

    def _signalled(self, number: int, frame: FrameType | None) -> None:
        if self.asked:
            raise KeyboardInterrupt
        self.asked = True
        self.reason = signal.Signals(number).name
        self._say(f"{self.reason}: finishing this iteration, then saving; once more stops at once")


class AtOnce(StopFlag):
    """Ctrl-C or SIGTERM: stop at once, for what has nothing to save. A context manager holds the signals.

    SIGTERM, too, is then a KeyboardInterrupt, so that temporary folders go and processes end.
    """

    def install(self, say: Callable[[str], None]) -> None:
        """Take over the signals, once."""
        if not self._before:
            super().install(say)

    def __enter__(self) -> Self:
        """Take over the signals."""
        self.install(print)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.uninstall()

    def _signalled(self, number: int, frame: FrameType | None) -> None:
        raise KeyboardInterrupt

"""Ctrl-C and SIGTERM: finish the iteration and save first."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType, TracebackType
from typing import Any, NoReturn, Self

_told = threading.Event()


def stop_at_once(number: int | None = None, frame: FrameType | None = None) -> NoReturn:
    """Note that it was asked for, and raise KeyboardInterrupt.

    Libraries make other errors of that: a file that was being read is then one that cannot be read.
    """
    _told.set()
    raise KeyboardInterrupt


@contextmanager
def noted_interrupts() -> Iterator[Callable[[], bool]]:
    """Give a function that says whether the process was told to stop at once, from here on.

    Ctrl-C does so where nobody has taken over the signal.
    """
    _told.clear()
    free = signal.getsignal(signal.SIGINT) is signal.default_int_handler
    mine = free and threading.current_thread() is threading.main_thread()
    if mine:
        signal.signal(signal.SIGINT, stop_at_once)
    try:
        yield _told.is_set
    finally:
        if mine:
            signal.signal(signal.SIGINT, signal.default_int_handler)


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
            stop_at_once()
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
        stop_at_once()

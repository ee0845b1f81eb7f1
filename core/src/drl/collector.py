"""Python's garbage collector beside a loop: what stays for good is set aside, so that it is not gone through again.

Libraries, models and compiled graphs are half a million objects and more. Going through all of them stops a run
for a third of a second, in the middle of anything.
"""

from __future__ import annotations

import gc
import time
from dataclasses import dataclass
from types import TracebackType

PATIENCE_S = 10.0
"""A loop that is over by then is not worth going through everything once."""


@dataclass(slots=True)
class LongLived:
    """Sets aside, once, what a loop has loaded and compiled; at its end the collector sees everything again.

    Objects are still freed with their last reference; only cycles among those that were set aside stay until
    then, with all that they refer to. Where somebody else has set objects aside, that is left alone.
    """

    began: float | None = None
    done: bool = False
    aside: bool = False

    def __enter__(self) -> LongLived:
        """The loop begins."""
        self.began = time.monotonic()
        return self

    def settle(self) -> None:
        """An iteration ends. Free what is garbage and set the rest aside, if ``PATIENCE_S`` have passed."""
        if self.done or self.began is None or time.monotonic() - self.began < PATIENCE_S:
            return
        self.done = True
        if not gc.get_freeze_count():
            gc.collect()
            gc.freeze()
            self.aside = True

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """The loop ends, whatever ended it."""
        if self.aside:
            gc.unfreeze()
        self.began, self.done, self.aside = None, False, False

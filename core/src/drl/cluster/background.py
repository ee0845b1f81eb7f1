"""An event loop in a thread of its own: the driver stays plain sequential code."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Coroutine
from typing import TypeVar

Result = TypeVar("Result")


class Background:
    """Runs coroutines for a caller that blocks. Engines and rewards live on its loop."""

    def __init__(self) -> None:
        self.loop = asyncio.new_event_loop()
        self.thread = threading.Thread(target=self.loop.run_forever, name="drl-io", daemon=True)
        self.thread.start()

    def run(self, coroutine: Coroutine[object, object, Result]) -> Result:
        """Return the coroutine's result; an interrupt of the caller cancels it first."""
        future = asyncio.run_coroutine_threadsafe(coroutine, self.loop)
        try:
            return future.result()
        except BaseException:
            future.cancel()
            raise

    def close(self) -> None:
        """Stop the loop and wait for its thread; a second call is harmless."""
        if self.loop.is_closed():
            return
        self.loop.call_soon_threadsafe(self.loop.stop)
        self.thread.join(timeout=10)
        if not self.thread.is_alive():
            self.loop.close()

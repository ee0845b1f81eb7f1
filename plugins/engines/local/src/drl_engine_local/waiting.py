"""Samples that wait: for a batch, in the order in which they were asked for, and then for the device."""

from __future__ import annotations

import time
from collections.abc import Callable, Hashable, Sequence
from concurrent.futures import Future, InvalidStateError, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import islice
from threading import Lock, Semaphore

from drl.api import Sample
from drl_engine_local.result import Launched
from drl_engine_local.schedule import Row

PAUSE_S = 0.001
AHEAD = 1
"""Batches that may still run when the next one is launched: the device never runs dry, nor far behind."""


@dataclass(eq=False, slots=True)
class Job:
    """A row that waits. ``launched``: a batch has it; ``done``: its sample, or what went wrong.

    ``key``: that of the row, made once: a batch is chosen by comparing it with many others.
    """

    row: Row
    launched: bool = False
    done: Future[Sample] = field(default_factory=Future)
    key: Hashable = field(init=False)

    def __post_init__(self) -> None:
        self.key = self.row.key

    @property
    def waits(self) -> bool:
        """Say whether a batch may still take it: none has, and it has neither failed nor been cancelled."""
        return not self.launched and not self.done.done()

    def finish(self, sample: Sample) -> None:
        """Hand the sample over, if it is still wanted."""
        with suppress(InvalidStateError):
            self.done.set_result(sample)

    def fail(self, error: BaseException) -> None:
        """Say what went wrong, if anyone still waits."""
        with suppress(InvalidStateError):
            self.done.set_exception(error)

    def turned(self, turn: Future[None]) -> None:
        """Take notice of the end of the job's own turn on the engine's thread."""
        if turn.cancelled():
            self.done.cancel()
        elif (error := turn.exception()) is not None:
            self.fail(error)


class WaitingRows:
    """The waiting jobs; filled by event loops, emptied by the engine's thread."""

    def __init__(self, count: int, patience_s: float, busy: Callable[[], bool]) -> None:
        self.count = count
        self.patience_s = patience_s
        self.busy = busy
        self.lock = Lock()
        self.jobs: list[Job] = []

    def add(self, jobs: Sequence[Job]) -> None:
        """Put jobs at the end."""
        with self.lock:
            self.jobs.extend(jobs)

    def remove(self, jobs: Sequence[Job]) -> None:
        """Forget jobs: done, failed or no longer wanted."""
        gone = set(jobs)
        with self.lock:
            self.jobs = [job for job in self.jobs if job not in gone]

    def batch_with(self, job: Job) -> list[Job]:
        """Return up to ``count`` jobs that fit beside ``job``, which is the first of them.

        A batch that is not full waits until nothing has arrived for ``patience_s``: the requests of
        one iteration come in a burst, and a half-empty batch costs as much as a full one. While the
        device is busy with the batch before, waiting costs nothing.
        """
        batch = self._fitting(job)
        last = time.monotonic()
        while len(batch) < self.count and (
            time.monotonic() - last < self.patience_s or self.busy()
        ):
            time.sleep(PAUSE_S)
            more = self._fitting(job)
            if len(more) > len(batch):
                last = time.monotonic()
            batch = more
        return batch

    def _fitting(self, job: Job) -> list[Job]:
        with self.lock:
            others = (
                other
                for other in self.jobs
                if other is not job and other.waits and other.key == job.key
            )
            return [job, *islice(others, self.count - 1)]


class Finishing:
    """Waits for batches that are queued on the device, in their order, in a thread of its own.

    So the engine's thread launches the next batch meanwhile. What is done when it comes is delivered
    at once, without that thread: on a CPU every batch.
    """

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="drl-engine-finishing")
        self._room = Semaphore(AHEAD)
        self._lock = Lock()
        self._running = 0
        self._since = 0.0

    def take(self, batch: Launched, jobs: Sequence[Job]) -> None:
        """Deliver the samples of a batch once they are whole; waits for the batch before the last one."""
        if not self.busy() and batch.copies.done:
            self._deliver(batch, jobs)
            return
        self._room.acquire()
        with self._lock:
            self._running += 1
        self._thread.submit(self._wait, batch, jobs)

    def busy(self) -> bool:
        """Say whether a batch is still queued or running on the device."""
        with self._lock:
            return self._running > 0

    def settle(self) -> None:
        """Wait until everything that was launched is delivered."""
        self._thread.submit(time.monotonic).result()

    def stop(self) -> None:
        """Deliver what is queued, and end."""
        self._thread.shutdown()

    def _wait(self, batch: Launched, jobs: Sequence[Job]) -> None:
        try:
            self._deliver(batch, jobs)
        finally:
            with self._lock:
                self._running -= 1
            self._room.release()

    def _deliver(self, batch: Launched, jobs: Sequence[Job]) -> None:
        try:
            samples = batch.samples(since=self._since)
        except Exception as error:  # in a thread of its own nobody else would tell those who wait
            for job in jobs:
                job.fail(error)
            return
        self._since = time.perf_counter()
        for job, sample in zip(jobs, samples, strict=True):
            job.finish(sample)

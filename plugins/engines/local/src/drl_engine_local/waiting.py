"""Samples that wait for a batch, in the order in which they were asked for."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from threading import Lock

from drl.api import Sample
from drl_engine_local.schedule import Row

PAUSE_S = 0.001


@dataclass(eq=False, slots=True)
class Job:
    """A row that waits, and its sample once a batch has made it."""

    row: Row
    sample: Sample | None = None


class WaitingRows:
    """The waiting jobs; filled by event loops, emptied by the engine's thread."""

    def __init__(self, count: int, patience_s: float) -> None:
        self.count = count
        self.patience_s = patience_s
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
        one iteration come in a burst, and a half-empty batch costs as much as a full one.
        """
        batch = self._fitting(job)
        last = time.monotonic()
        while len(batch) < self.count and time.monotonic() - last < self.patience_s:
            time.sleep(PAUSE_S)
            more = self._fitting(job)
            if len(more) > len(batch):
                last = time.monotonic()
            batch = more
        return batch

    def _fitting(self, job: Job) -> list[Job]:
        with self.lock:
            others = [
                other
                for other in self.jobs
                if other is not job and other.sample is None and other.row.key == job.row.key
            ]
        return [job, *others[: self.count - 1]]

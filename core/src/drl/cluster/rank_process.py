"""A rank above 0 as the driver sees it: a process that answers calls, or has ended."""

from __future__ import annotations

import multiprocessing
import queue
import signal
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path

from drl.cluster.ranks_wire import Failure, Line
from drl.cluster.ranks_worker import Build, run_rank
from drl.errors import RankError
from drl.model.parallel import RankSettings

GRACE_S = 5.0
"""How long a rank may take to end by itself once it was told to."""


class RankProcess:
    """Starts the process of one rank. ``lost`` is called, from a thread, when it ends unasked."""

    def __init__(
        self,
        rank: int,
        settings: RankSettings,
        rendezvous: Path,
        build: Build,
        *,
        threads: int,
        lost: Callable[[], None],
    ) -> None:
        # spawn: a fork would copy locks of this process's threads, and CUDA not at all
        context = multiprocessing.get_context("spawn")
        ours, theirs = context.Pipe()
        self.rank = rank
        self.failure: Failure | None = None
        self.ended = threading.Event()
        self._lost = lost
        self._closing = False
        self._line = Line(ours)
        self._replies: queue.SimpleQueue[object] = queue.SimpleQueue()
        self._saves: dict[int, Future[None]] = {}
        self._saves_lock = threading.Lock()
        self._process = context.Process(
            target=run_rank,
            args=(theirs, rank, settings, rendezvous, build, threads),
            name=f"drl-rank-{rank}",
            daemon=True,
        )
        self._process.start()
        theirs.close()  # or its end would never be noticed
        self._reader = threading.Thread(target=self._read, name=f"drl-rank-{rank}", daemon=True)
        self._reader.start()

    @property
    def pid(self) -> int | None:
        """Process id."""
        return self._process.pid

    def call(self, name: str, *arguments: object) -> None:
        """Ask for a call; ``reply`` gives the answer. A rank that has ended is met there."""
        try:
            self._line.send((name, arguments))
        except OSError:
            return

    def save_in_background(self, path: Path, number: int) -> Future[None]:
        """Ask for a call of ``begin_save``; the future ends when this rank has written its part."""
        future: Future[None] = Future()
        with self._saves_lock:
            self._saves[number] = future
        self.call("begin_save", path, number)
        if self.ended.is_set():
            self._fail_saves()
        return future

    def reply(self, timeout_s: float) -> object:
        """Return the answer to the oldest call; raises RankError when it ended or takes too long."""
        try:
            answer = self._replies.get(timeout=timeout_s)
        except queue.Empty as error:
            raise RankError(
                f"rank {self.rank} has not answered for {timeout_s:.0f} s "
                "(cluster.distributed_timeout_minutes)"
            ) from error
        if answer is LOST:
            self._replies.put(LOST)  # whoever asks next must hear it too
            raise RankError(self.words())
        return answer

    def words(self) -> str:
        """Return why this rank ended, for a person."""
        failure = self.failure
        return f"rank {self.rank} has ended" if failure is None else failure.text

    def close(self) -> None:
        """Let the process end; kill it when it does not. A second call is harmless."""
        self._closing = True
        self.call("close")
        self._process.join(GRACE_S)
        self.kill()

    def kill(self) -> None:
        """End the process at once."""
        self._closing = True
        self._process.kill()
        self._process.join()
        self._reader.join(GRACE_S)

    def _read(self) -> None:
        while True:
            try:
                kind, *content = self._line.receive()
            except (EOFError, OSError):
                break
            if kind == "reply":
                self._replies.put(content[0])
            elif kind == "failed":
                self.failure = content[0]
            else:
                self._end_save(*content)
        self._process.join()
        if self.failure is None:
            text = f"rank {self.rank} died ({_cause_of_death(self._process.exitcode)})"
            # what it could not say comes before what others say about it
            self.failure = Failure(self.rank, text, time.monotonic() - GRACE_S)
        self.ended.set()
        self._replies.put(LOST)
        self._fail_saves()
        if not self._closing:
            self._lost()

    def _end_save(self, number: int, problem: str | None) -> None:
        with self._saves_lock:
            future = self._saves.pop(number)
        if problem is None:
            future.set_result(None)
        else:
            future.set_exception(OSError(f"rank {self.rank}: {problem}"))

    def _fail_saves(self) -> None:
        with self._saves_lock:
            open_saves, self._saves = self._saves, {}
        for future in open_saves.values():
            future.set_exception(RankError(self.words()))


LOST = object()


def _cause_of_death(code: int | None) -> str:
    if code is None or code >= 0:
        return f"exit code {code}"
    name = signal.Signals(-code).name
    hint = ": often the system, out of memory" if name == "SIGKILL" else ""
    return f"{name}{hint}"

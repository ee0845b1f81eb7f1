"""N ranks of one trainer on this machine: rank 0 here, the others in processes that follow its calls."""

from __future__ import annotations

import atexit
import os
import shutil
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from drl.checkpoint.state import RESUME, RestoreOptions
from drl.cluster.rank_process import GRACE_S, RankProcess
from drl.cluster.ranks_wire import Failure
from drl.cluster.ranks_worker import Build
from drl.errors import BadInput, DrlError, RankError
from drl.model.parallel import (
    Ranks,
    RankSettings,
    abort_ranks,
    loopback_only,
    start_ranks,
    stop_ranks,
)

if TYPE_CHECKING:
    from torch import nn

    from drl.interfaces.engine import EngineHandle
    from drl.interfaces.updater import PushReport
    from drl.lora import AdapterSnapshot
    from drl.model.ema import Ema
    from drl.model.trainer import Trainer
    from drl.types import ParityReport, Shard, StepReport

START_S = 300.0
"""How long a rank may take to import what it needs."""


class RankGroup:
    """The processes of ranks 1 to N - 1, and this process as rank 0.

    ``start`` builds all ranks. ``together`` is the door for every later call: whatever goes wrong in it,
    on any rank, ends all ranks and shows what the rank that was first to fail has to say.
    """

    def __init__(self, settings: RankSettings) -> None:
        self.settings = settings
        self.others: list[RankProcess] = []
        self.broken: str | None = None
        self.ranks: Ranks | None = None
        self._stack = ExitStack()

    def start(self, build: Build, build_here: Build) -> Trainer:
        """Start every rank; ``build`` runs in the other processes, ``build_here`` in this one."""
        check_devices(self.settings)
        # before multiprocessing's own, which would wait for ranks that nobody told to end
        atexit.register(self.close)
        self._stack.callback(atexit.unregister, self.close)
        folder = Path(tempfile.mkdtemp(prefix="drl-ranks-"))
        self._stack.callback(shutil.rmtree, folder, ignore_errors=True)
        threads = torch.get_num_threads()
        each = threads_per_rank(threads, self.settings.world)
        # all alike, this process too: bits of a sum depend on the number of threads
        torch.set_num_threads(each)
        self._stack.callback(torch.set_num_threads, threads)
        self._stack.enter_context(loopback_only())
        with self.together():
            for rank in range(1, self.settings.world):
                process = RankProcess(
                    rank,
                    self.settings,
                    folder / "rendezvous",
                    build,
                    threads=each,
                    lost=self._abort,
                )
                self.others.append(process)
            self.collect(START_S)
            self.ranks = start_ranks(0, self.settings, folder / "rendezvous")
            trainer = build_here(self.ranks)
            self.collect()
        return trainer

    @contextmanager
    def together(self) -> Iterator[None]:
        """Do this rank's part of a call; on any failure end all ranks and raise the first cause."""
        if self.broken is not None:
            raise RankError(f"the ranks of the trainer have ended: {self.broken}")
        try:
            yield
        except BaseException as error:
            cause = self._first_failure(error)
            self.end(error if cause is None else cause)
            if cause is None or cause is error:
                raise
            raise cause from error

    def ask(self, name: str, *arguments: object) -> None:
        """Ask every other rank for a call."""
        for process in self.others:
            process.call(name, *arguments)

    def collect(self, timeout_s: float | None = None) -> list[object]:
        """Return the answers of the other ranks; raises RankError."""
        limit = self.settings.timeout_s if timeout_s is None else timeout_s
        return [process.reply(limit) for process in self.others]

    def end(self, reason: BaseException) -> None:
        """End every other process at once, and this process's part in the group."""
        self.broken = " ".join(str(reason).split()) or type(reason).__name__
        for process in self.others:
            process.kill()
        self._abort()
        self._leave()

    def close(self) -> None:
        """Let every rank end; a second call is harmless."""
        if self.broken is None:
            self.broken = "the trainer was closed"
            self.ask("close")  # before any is waited for: ranks leave their groups together
            stop_ranks()
            for process in self.others:
                process.close()
            self._leave()

    def _abort(self) -> None:
        ranks, self.ranks = self.ranks, None
        abort_ranks(ranks)

    def _leave(self) -> None:
        stop_ranks()
        self._stack.close()

    def _first_failure(self, error: BaseException) -> RankError | None:
        """Return what another rank has to say about a failure; None when it is this rank's own."""
        own = isinstance(error, DrlError) and not isinstance(error, RankError)
        if own or not isinstance(error, Exception):
            return None
        failures = self._failures(GRACE_S)
        if not failures:
            return self._waited_in_vain(error)
        first = min(failures, key=lambda failure: failure.moment)
        head = f"rank {first.rank} of {self.settings.world} failed: "
        return RankError(head + first.text, first.exit_code)

    def _waited_in_vain(self, error: Exception) -> RankError | None:
        """Return what to say when every other rank lives but one did not come to a collective."""
        if isinstance(error, RankError):
            return error
        words = str(error)
        if not (isinstance(error, dist.DistError) or "gloo" in words or "NCCL" in words):
            return None
        return RankError(
            f"rank 0 waited for the other {len(self.others)} ranks, of which one did not come within "
            f"{self.settings.timeout_s:.0f} s (cluster.distributed_timeout_minutes):\n"
            + words.partition("\n")[0]
        )

    def _failures(self, patience_s: float) -> list[Failure]:
        """Return why other ranks ended; one that fails takes the others along within moments."""
        deadline = time.monotonic() + patience_s
        for process in self.others:
            process.ended.wait(max(0.0, deadline - time.monotonic()))
        return [process.failure for process in self.others if process.failure is not None]


class RankedTrainer:
    """TrainerRole over N ranks: every call reaches every rank; answers are those of rank 0."""

    def __init__(self, own: Trainer, group: RankGroup) -> None:
        self.own = own
        self.group = group
        self._saves = 0

    @property
    def models(self) -> Mapping[str, nn.Module]:
        """Rank 0's components; parameters are shards where weights are sharded."""
        return self.own.models

    @property
    def ema(self) -> Ema | None:
        """Rank 0's part of the moving average."""
        return self.own.ema

    @property
    def next_rollout(self) -> int:
        """The rollout that comes next."""
        return self.own.next_rollout

    @property
    def global_step(self) -> int:
        """Optimizer steps so far."""
        return self.own.global_step

    @property
    def remarks(self) -> tuple[str, ...]:
        """What a person should know of the last ``restore``."""
        return self.own.remarks

    def use_updater(self, name: str) -> None:
        """Make the updater of this name on every rank."""
        with self.group.together():
            self.group.ask("use_updater", name)
            self.own.use_updater(name)
            self.group.collect()

    def train(self, shards: Sequence[Shard]) -> Iterator[StepReport]:
        """Run all optimizer windows; each rank gets its own shard alone."""
        with self.group.together():
            for process in self.group.others:
                process.call("train", shards[process.rank])
            yield from self.own.train(shards)
            self.group.collect()

    def replay(self, shards: Sequence[Shard]) -> ParityReport:
        """Score the recorded steps on every rank; the report is about all of them."""
        with self.group.together():
            for process in self.group.others:
                process.call("replay", shards[process.rank])
            report = self.own.replay(shards)
            self.group.collect()
        return report

    def push(self, version: int, engines: Sequence[EngineHandle]) -> Sequence[PushReport]:
        """Push from rank 0; the other ranks help to gather the weights."""
        with self.group.together():
            self.group.ask("push", version)
            reports = self.own.push(version, engines)
            self.group.collect()
        return reports

    def save(self, path: Path) -> None:
        """Write the training state; every rank writes its part."""
        with self.group.together():
            self.group.ask("save", path)
            self.own.save(path)
            self.group.collect()

    def begin_save(self, path: Path) -> Future[None]:
        """Copy the training state on every rank; the future ends when all have written their parts."""
        with self.group.together():
            self._saves += 1
            parts = [process.save_in_background(path, self._saves) for process in self.group.others]
            parts.append(self.own.begin_save(path))
            self.group.collect()
        return all_of(parts)

    def restore(self, path: Path, options: RestoreOptions = RESUME) -> int:
        """Read a training state on every rank; raises RankError when ranks read different ones."""
        with self.group.together():
            self.group.ask("restore", path, options)
            first = self.own.restore(path, options)
            for process, answer in zip(self.group.others, self.group.collect(), strict=True):
                if answer != first:
                    raise RankError(
                        f"{path}: rank {process.rank} would go on at rollout {answer}, rank 0 at {first}"
                    )
        return first

    def adapters(self) -> Mapping[str, AdapterSnapshot]:
        """Return copies of the adapters, whole."""
        with self.group.together():
            self.group.ask("adapters")
            snapshots = self.own.adapters()
            self.group.collect()
        return snapshots

    def write_weights(self, folder: Path) -> list[Path]:
        """Write the weights of fully trained components, whole; rank 0 writes."""
        with self.group.together():
            self.group.ask("write_weights", folder)
            written = self.own.write_weights(folder)
            self.group.collect()
        return written

    @property
    def payload(self) -> str | None:
        """What the updater pushes; None without one."""
        return self.own.payload

    def sleep(self, *, frozen: bool = True) -> None:
        """Give device memory back on every rank; ``frozen``: of weights that are not trained too."""
        with self.group.together():
            self.group.ask("sleep", frozen)
            self.own.sleep(frozen=frozen)
            self.group.collect()

    def wake(self) -> None:
        """Take device memory again on every rank."""
        with self.group.together():
            self.group.ask("wake")
            self.own.wake()
            self.group.collect()

    def close(self) -> None:
        """End every rank; a second call is harmless."""
        self.group.close()


def check_devices(settings: RankSettings) -> None:
    """Raise BadInput when there are fewer GPUs than ranks."""
    if settings.device == "cpu":
        return
    count = torch.cuda.device_count()
    if count < settings.world:
        raise BadInput(
            f"cluster.actor_num_gpus_per_node = {settings.world}, but {count} GPUs are visible here"
        )


def threads_per_rank(threads: int, world: int) -> int:
    """Return the threads of each rank: the machine's, shared out, unless the user chose a number."""
    return threads if "OMP_NUM_THREADS" in os.environ else max(1, threads // world)


def all_of(parts: Sequence[Future[None]]) -> Future[None]:
    """Return a future that ends when all have; it fails like the first that did."""
    whole: Future[None] = Future()
    lock = threading.Lock()
    left = len(parts)

    def one_ended(_: Future[None]) -> None:
        nonlocal left
        with lock:
            left -= 1
            if left:
                return
        errors = [error for part in parts if (error := part.exception()) is not None]
        if errors:
            whole.set_exception(errors[0])
        else:
            whole.set_result(None)

    for part in parts:
        part.add_done_callback(one_ended)
    return whole

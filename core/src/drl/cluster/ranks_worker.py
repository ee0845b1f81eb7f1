"""The process of a rank above 0: build the trainer, then follow the driver's calls."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
import time
import traceback
from collections.abc import Callable
from multiprocessing import connection
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from drl.cluster.ranks_wire import Failure, Line
from drl.collector import LongLived
from drl.deterministic import explained
from drl.errors import DrlError
from drl.model.parallel import Ranks, RankSettings, loopback_only, start_ranks, stop_ranks

if TYPE_CHECKING:
    from concurrent.futures import Future
    from multiprocessing.connection import Connection

    from drl.model.trainer import Trainer
    from drl.types import Shard


Build = Callable[[Ranks], "Trainer"]
"""Builds a rank's trainer in its own process; collective over the ranks."""


def run_rank(
    pipe: Connection,
    rank: int,
    settings: RankSettings,
    rendezvous: Path,
    build: Build,
    threads: int,
) -> None:
    """Be rank ``rank`` until the driver says "close", or is gone, or something fails."""
    # Ctrl-C and SIGTERM are the driver's to handle; it ends its ranks itself
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    threading.Thread(target=_end_with_driver, name="drl-watch", daemon=True).start()
    torch.set_num_threads(threads)
    line = Line(pipe)
    try:
        line.send(("reply", "ready"))
        with loopback_only():
            ranks = start_ranks(rank, settings, rendezvous)
            trainer = build(ranks)
            line.send(("reply", "built"))
            _follow(line, trainer, ranks)
        stop_ranks()
    except EOFError:
        os._exit(1)  # the driver is gone, and with it whoever could read why
    except BaseException as error:
        _report(line, rank, explained(error))
        # at once: what waits in a collective for this rank sees its connections close
        os._exit(1)


def _report(line: Line, rank: int, error: BaseException) -> None:
    """Tell the driver why this rank ends."""
    if isinstance(error, DrlError):
        failure = Failure(rank, str(error), time.monotonic(), error.exit_code)
    else:
        text = "".join(traceback.format_exception(error)).rstrip()
        failure = Failure(rank, text, time.monotonic())
    try:
        line.send(("failed", failure))
    except OSError:
        return  # nobody listens any more


def _end_with_driver() -> None:
    """End this process when the driver is gone: one that was killed cannot end its ranks."""
    driver = multiprocessing.parent_process()
    if driver is not None:
        connection.wait([driver.sentinel])
        os._exit(1)


def _follow(line: Line, trainer: Trainer, ranks: Ranks) -> None:
    """Answer calls in order until the driver closes."""
    long_lived = LongLived()

    def train(shard: Shard) -> int:
        for _ in trainer.train([shard] * ranks.world):
            pass
        long_lived.settle()  # or the other ranks would wait for each collection of everything
        return trainer.next_rollout

    def replay(shard: Shard) -> None:
        trainer.replay([shard] * ranks.world)

    def push(version: int) -> None:
        trainer.push(version, ())

    def sleep(frozen: bool) -> None:
        trainer.sleep(frozen=frozen)

    def adapters() -> None:
        trainer.adapters()  # rank 0 has them all

    def begin_save(path: Path, number: int) -> None:
        future = trainer.begin_save(path)
        future.add_done_callback(lambda done: line.send(("saved", number, _failure_text(done))))

    calls: dict[str, Callable[..., object]] = {
        "train": train,
        "replay": replay,
        "push": push,
        "use_updater": trainer.use_updater,
        "adapters": adapters,
        "begin_save": begin_save,
        "save": trainer.save,
        "restore": trainer.restore,
        "write_weights": trainer.write_weights,
        "sleep": sleep,
        "wake": trainer.wake,
    }
    with long_lived:
        while True:
            name, arguments = line.receive()
            if name == "close":
                return
            line.send(("reply", calls[name](*arguments)))


def _failure_text(done: Future[None]) -> str | None:
    error = done.exception()
    return None if error is None else f"{type(error).__name__}: {error}"

"""The trainer of a run that trains nothing: it brings start weights to engines, where they need any."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

from drl.errors import ContractError

if TYPE_CHECKING:
    from concurrent.futures import Future
    from pathlib import Path

    from drl.checkpoint.state import RestoreOptions
    from drl.cluster.ranks import RankedTrainer
    from drl.interfaces.engine import EngineHandle
    from drl.interfaces.updater import PushReport
    from drl.lora import AdapterSnapshot
    from drl.model.trainer import Trainer
    from drl.types import ParityReport, Shard, StepReport


class Idle:
    """TrainerRole without training. ``own`` holds the weights that an engine does not read by itself.

    It has no adapters and no weights to write: nothing that it holds was trained here.
    """

    def __init__(self, own: Trainer | RankedTrainer | None = None) -> None:
        self.own = own
        self.next_rollout = 0
        self.remarks: tuple[str, ...] = ()

    def use_updater(self, name: str) -> None:
        """Push through the updater of this name, if there is something to push."""
        if self.own is not None:
            self.own.use_updater(name)

    def push(self, version: int, engines: Sequence[EngineHandle]) -> Sequence[PushReport]:
        """Push the start weights; an engine that has them from its checkpoint gets none."""
        return () if self.own is None else self.own.push(version, engines)

    def restore(self, path: Path, options: RestoreOptions) -> int:
        """Read the weights of a checkpoint; return its next rollout id."""
        if self.own is None:
            raise ContractError("a checkpoint is to be read, but no weights were built to hold it")
        self.next_rollout = self.own.restore(path, options)
        self.remarks = self.own.remarks
        return self.next_rollout

    def adapters(self) -> Mapping[str, AdapterSnapshot]:
        """Return no adapter."""
        return {}

    def write_weights(self, folder: Path) -> list[Path]:
        """Write nothing."""
        return []

    def train(self, shards: Sequence[Shard]) -> Iterator[StepReport]:
        """Refuse."""
        raise untrained("train")

    def replay(self, shards: Sequence[Shard]) -> ParityReport:
        """Refuse."""
        raise untrained("replay")

    def save(self, path: Path) -> None:
        """Refuse."""
        raise untrained("save")

    def begin_save(self, path: Path) -> Future[None]:
        """Refuse."""
        raise untrained("save")

    @property
    def payload(self) -> str | None:
        """What the updater pushes; None when there is nothing to push."""
        return None if self.own is None else self.own.payload

    def sleep(self, *, frozen: bool = True) -> None:
        """Give device memory back."""
        if self.own is not None:
            self.own.sleep(frozen=frozen)

    def wake(self) -> None:
        """Take device memory again."""
        if self.own is not None:
            self.own.wake()

    def close(self) -> None:
        """End what was built; a second call is harmless."""
        if self.own is not None:
            self.own.close()


def untrained(what: str) -> ContractError:
    """Return the error of a call that a run without training must not make."""
    return ContractError(f"a run without training was asked to {what}")

"""The three objects that stages talk to, whatever launched them: trainer, engines, rewards."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from concurrent.futures import Future
    from pathlib import Path

    from drl.checkpoint.state import RestoreOptions
    from drl.interfaces.engine import EngineHandle, Memory, WeightProof
    from drl.interfaces.updater import PushReport
    from drl.lora import AdapterSnapshot
    from drl.types import ParityReport, RolloutRequest, Sample, Score, Shard, StepReport


class TrainerRole(Protocol):
    """The trainer; every call reaches every rank."""

    @property
    def next_rollout(self) -> int:
        """The rollout that comes next."""
        ...

    def use_updater(self, name: str) -> None:
        """Push through the updater of this name from now on."""
        ...

    def train(self, shards: Sequence[Shard]) -> Iterator[StepReport]:
        """Run all optimizer windows of a rollout, one report per step, in order."""
        ...

    def replay(self, shards: Sequence[Shard]) -> ParityReport:
        """Score the recorded steps without gradient and compare with the engine's log-probs."""
        ...

    def push(self, version: int, engines: Sequence[EngineHandle]) -> Sequence[PushReport]:
        """Push the trained weights of every component."""
        ...

    def save(self, path: Path) -> None:
        """Write the training state into an existing empty folder."""
        ...

    def begin_save(self, path: Path) -> Future[None]:
        """Copy the training state and return; the future ends when it is in the existing folder."""
        ...

    def restore(self, path: Path, options: RestoreOptions = ...) -> int:
        """Read a training state; return the next rollout id."""
        ...

    @property
    def remarks(self) -> tuple[str, ...]:
        """What a person should know about the state that was restored."""
        ...

    def adapters(self) -> Mapping[str, AdapterSnapshot]:
        """Copy the adapters of every component to the CPU."""
        ...

    def write_weights(self, folder: Path) -> Sequence[Path]:
        """Write the weights of fully trained components, whole; return the files."""
        ...

    @property
    def payload(self) -> str | None:
        """What the updater pushes ("lora", "dense", "merged"); None without one."""
        ...

    def sleep(self, *, frozen: bool = True) -> None:
        """Give device memory back; ``frozen`` False: weights that are not trained stay, an engine has them."""
        ...

    def wake(self) -> None:
        """Take device memory again."""
        ...

    def close(self) -> None:
        """End every rank."""
        ...


class EnginePool(Protocol):
    """Engines behind one door: dispatch, health, restart."""

    async def generate(self, request: RolloutRequest) -> list[Sample]:
        """Send one microgroup to the engine with the least to do."""
        ...

    async def recover(self) -> Sequence[EngineHandle]:
        """Restart dead engines; return the new ones, which serve after the next whole sync."""
        ...

    def handles(self) -> Sequence[EngineHandle]:
        """Return a handle of every live engine."""
        ...

    def begin_update(self, version: int) -> None:
        """Tell every engine that weights will come."""
        ...

    def end_update(self, version: int) -> Sequence[WeightProof]:
        """Let every engine prove what it holds and serve again."""
        ...

    def release(self, what: Memory) -> None:
        """Let every engine give memory back."""
        ...

    def resume(self, what: Memory) -> None:
        """Let every engine take its memory again: weights first."""
        ...


class RewardPool(Protocol):
    """Rewards behind one door."""

    async def score(self, samples: Sequence[Sample]) -> Sequence[dict[str, Score]]:
        """Return the scores of every term, per sample, in order."""
        ...

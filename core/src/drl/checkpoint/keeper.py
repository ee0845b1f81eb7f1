"""``StateKeeper``: saves and restores one rank's share of a trainer, at once or in the background."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from drl.checkpoint.optimizer import (
    MayMiss,
    check_known,
    check_missing,
    put_state,
    state_of,
    targets_for,
)
from drl.checkpoint.rng import TrainingRandomness, read_rng
from drl.checkpoint.staging import Shards, Staging
from drl.checkpoint.state import (
    EMA,
    MODEL,
    OPTIMIZER,
    RESUME,
    RestoreOptions,
    Source,
    Writer,
    shards_of,
)
from drl.errors import CheckpointError
from drl.model.parallel import ALONE, Ranks, reshard
from drl.types import EMPTY

if TYPE_CHECKING:
    from pathlib import Path

    import torch
    from torch import nn
    from torch.distributed.checkpoint.metadata import Metadata

    from drl.lora import LoraConfig
    from drl.mathematics.schedule import ScheduleSettings
    from drl.model.ema import Ema
    from drl.model.scaler import LossScaler


@dataclass(frozen=True, slots=True, kw_only=True)
class SaveSettings:
    """What a save needs to know beside the trainer's parts.

    ``optimizer``: its state is saved. ``may_miss``: parts of parameter names without optimizer state, by
    component. ``lora``: adapter settings by component, for the adapters that are exported.
    """

    optimizer: bool = True
    may_miss: MayMiss = EMPTY
    lora: Mapping[str, LoraConfig] = EMPTY


EVERYTHING = SaveSettings()
"""The optimizer's state is saved and complete; no adapters."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Parts:
    """What a training state is made of, alive. ``position``: counters by the names of ``meta.json``."""

    models: Mapping[str, nn.Module]
    parameters: Mapping[str, nn.Parameter]
    optimizer: torch.optim.Optimizer
    ema: Ema | None
    scaler: LossScaler
    schedule: ScheduleSettings
    position: Mapping[str, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class Restored:
    """Where a checkpoint is in its run, whose schedule holds, and what a person should know."""

    meta: Mapping[str, Any]
    schedule: ScheduleSettings
    remarks: tuple[str, ...]


class StateKeeper:
    """The saves of one rank. ``randomness``: the stream that training draws from."""

    def __init__(
        self, *, seed: int, device: torch.device, settings: SaveSettings, ranks: Ranks = ALONE
    ) -> None:
        self.settings = settings
        self.ranks = ranks
        self.randomness = TrainingRandomness(seed, ranks.rank, device)
        self._staging = Staging()
        self._prepared = False
        self._last: Future[None] | None = None

    def save(self, folder: Path, parts: Parts) -> None:
        """Write the state into an existing folder before training goes on; collective."""
        self.wait()
        tensors, writer = self._collect(parts)
        writer.write(folder, tensors)

    def begin_save(self, folder: Path, parts: Parts) -> Future[None]:
        """Copy the state, return, and write the copy into an existing folder meanwhile; collective.

        The future ends when every rank has written its share, with what failed on one of them. The save
        before this one is waited for.
        """
        self.wait()
        tensors, writer = self._collect(parts)
        staged = self._staging.copy(tensors)
        self._last = in_background(lambda: writer.write(folder, staged.complete()))
        return self._last

    def wait(self) -> None:
        """Wait for the save in the background, whether or not it failed: its future tells that."""
        if self._last is not None:
            self._last.exception()
            self._last = None

    def prepare(self, parts: Parts) -> None:
        """Make room for copies ahead of the first save of a GPU's state; returns at once."""
        if self._prepared or self.randomness.device.type != "cuda":
            return
        self._prepared = True
        tensors, _ = self._collect(parts)
        self._staging.prepare(tensors)

    def _collect(self, parts: Parts) -> tuple[dict[str, Shards], Writer]:
        reshard(parts.models.values())
        tensors: dict[str, Shards] = {MODEL: shards_of(parts.parameters)}
        if self.settings.optimizer:
            state = state_of(parts.optimizer, parts.parameters, self.settings.may_miss)
            if state:
                tensors[OPTIMIZER] = state
        if parts.ema is not None:
            tensors[EMA] = shards_of(parts.ema.state())
        kept = "saved" if OPTIMIZER in tensors else "without state"
        facts = {
            **parts.position,
            "world_size": self.ranks.world,
            "optimizer": kept if self.settings.optimizer else "not saved",
            "ema": None if parts.ema is None else parts.ema.facts(),
            **count_parameters(parts),
        }
        writer = Writer(
            rank=self.ranks.rank,
            random=self.randomness.state,
            schedule=parts.schedule,
            scaler=parts.scaler.state(),
            facts=facts,
            group=self.ranks.save_group,
        )
        return tensors, writer

    def restore(self, folder: Path, parts: Parts, options: RestoreOptions = RESUME) -> Restored:
        """Take a state, written by any number of ranks; collective.

        Raises CheckpointError on every rank, before anything changed, when names or shapes differ, when
        metadata is refused, and when a part is missing that is asked for.
        """
        self.wait()
        reshard(parts.models.values())
        plan = self._together(lambda: self._plan(folder, parts, options))
        self._together(lambda: self._read(plan, parts))
        return Restored(meta=plan.source.meta, schedule=plan.schedule, remarks=tuple(plan.remarks))

    def _together(self, action: Callable[[], Any]) -> Any:
        """Return the action's result; an error of one rank is raised on all of them."""
        result, problem = None, None
        try:
            result = action()
        except CheckpointError as error:
            problem = error
        for found in self.ranks.gather(problem):
            if found is not None:
                raise found
        return result

    def _plan(self, folder: Path, parts: Parts, options: RestoreOptions) -> RestorePlan:
        source = Source(folder, trust=options.trust)
        model = source.check(MODEL, shards_of(parts.parameters))
        optimizer = self._plan_optimizer(source, parts) if options.optimizer else None
        ema = None
        if parts.ema is not None and source.has(EMA):
            ema = source.check(EMA, shards_of(parts.ema.state()))
        schedule, lines = source.schedule(parts.schedule, options.schedule)
        return RestorePlan(
            source=source,
            options=options,
            model=model,
            optimizer=optimizer,
            ema=ema,
            schedule=schedule,
            remarks=lines,
        )

    def _plan_optimizer(self, source: Source, parts: Parts) -> Metadata | None:
        kept = source.meta.get("optimizer")
        if kept == "not saved":
            raise CheckpointError(
                f"{source.folder} was saved without optimizer state (checkpoint.save_optim = false); set "
                "checkpoint.load_optim = false to start the optimizer anew"
            )
        if kept == "without state" and not source.has(OPTIMIZER):
            return None
        metadata = source.metadata(OPTIMIZER)
        check_known(metadata.state_dict_metadata, parts.parameters)
        check_missing(metadata.state_dict_metadata, parts.parameters, self.settings.may_miss)
        return metadata

    def _read(self, plan: RestorePlan, parts: Parts) -> None:
        source = plan.source
        source.read(MODEL, shards_of(parts.parameters), plan.model)
        if plan.optimizer is not None:
            targets = targets_for(plan.optimizer, parts.parameters)
            source.read(OPTIMIZER, shards_of(targets), plan.optimizer)
            put_state(parts.optimizer, parts.parameters, targets)
        self._read_ema(plan, parts)
        parts.scaler.load(source.scaler())
        if plan.options.rng:
            self._read_rng(plan)

    def _read_ema(self, plan: RestorePlan, parts: Parts) -> None:
        if parts.ema is None:
            return
        facts = plan.source.meta.get("ema")
        if plan.ema is None or not isinstance(facts, dict):
            parts.ema.reset()
            plan.remarks.append(
                "the checkpoint has no EMA; it starts as a copy of the loaded weights"
            )
            return
        shadow = parts.ema.state()
        plan.source.read(EMA, shards_of(shadow), plan.ema)
        parts.ema.load(shadow, facts["count"])
        plan.remarks.extend(parts.ema.take_settings(facts))

    def _read_rng(self, plan: RestorePlan) -> None:
        state = read_rng(plan.source.folder, self.ranks.rank)
        if state is not None:
            self.randomness.state = state
        world = plan.source.meta["world_size"]
        if world != self.ranks.world:
            plan.remarks.append(
                f"the checkpoint was made by {world} ranks, this run has {self.ranks.world}: weights and "
                "optimizer are the same, dropout draws other numbers"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class RestorePlan:
    """A checkpoint that was found to fit: metadata of the parts to read, None for parts to leave."""

    source: Source
    options: RestoreOptions
    model: Metadata
    optimizer: Metadata | None
    ema: Metadata | None
    schedule: ScheduleSettings
    remarks: list[str]


def count_parameters(parts: Parts) -> dict[str, int]:
    """Return how many numbers are trained, and how many the components have."""
    every = [p for model in parts.models.values() for p in model.parameters()]
    return {
        "trained_parameters": sum(parameter.numel() for parameter in parts.parameters.values()),
        "all_parameters": sum(parameter.numel() for parameter in every),
    }


def in_background(work: Callable[[], None]) -> Future[None]:
    """Do something in a thread that does not outlive the program; the future ends with it."""
    future: Future[None] = Future()

    def run() -> None:
        try:
            work()
        except BaseException as error:  # handed to whoever waits for the future
            future.set_exception(error)
        else:
            future.set_result(None)

    threading.Thread(target=run, name="drl-save", daemon=True).start()
    return future

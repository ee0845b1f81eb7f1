"""One rank's training state: collected, written into a folder, checked and read back.

The folder has ``model/``, ``optimizer/`` and ``ema/`` as torch distributed checkpoints (trainable
parameters only, by ``component.parameter``), ``rng/rank_00000.safetensors`` of every rank,
``lr_scheduler.json``, ``scaler.json`` and ``meta.json``.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.metadata import Metadata

from drl import __version__
from drl.checkpoint.dcp import read_tensors, write_tensors
from drl.checkpoint.meta import META, read_table
from drl.checkpoint.restricted import entries, read_metadata
from drl.checkpoint.rng import RandomState, write_rng
from drl.checkpoint.shards import Shard, shard_of
from drl.checkpoint.staging import Shards
from drl.errors import CheckpointError
from drl.mathematics.schedule import ScheduleSettings, schedule_state, settings_from_state
from drl.observe.files import write_json_atomic

if TYPE_CHECKING:
    from torch import Tensor

MODEL, OPTIMIZER, EMA = "model", "optimizer", "ema"
SCHEDULE, SCALER = "lr_scheduler.json", "scaler.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class RestoreOptions:
    """What of a checkpoint is taken.

    ``schedule``: whose learning-rate schedule holds; "equal": both must be the same. ``trust``: metadata
    may be a pickle that names anything, and is run.
    """

    optimizer: bool = True
    rng: bool = True
    schedule: str = "recipe"
    trust: bool = False


RESUME = RestoreOptions()


@dataclass(frozen=True, slots=True, kw_only=True)
class Writer:
    """What a rank writes beside its tensors, and with whom.

    ``facts``: of the trainer, for ``meta.json``. ``group``: of the CPU, for saves alone; None in a world of 1.
    """

    rank: int
    random: RandomState
    schedule: ScheduleSettings
    scaler: Mapping[str, float | int]
    facts: Mapping[str, Any]
    group: dist.ProcessGroup | None = None

    def write(self, folder: Path, tensors: dict[str, Shards]) -> None:
        """Write everything into an existing folder; collective. Raises OSError on every rank.

        ``tensors`` is emptied on the way, so that the memory of a copy is free as soon as it is written.
        """
        agree(lambda: self._write_small(folder), self.group)
        for name in list(tensors):
            write_tensors(tensors.pop(name), folder / name, group=self.group)

    def _write_small(self, folder: Path) -> None:
        write_rng(self.random, folder, self.rank)
        if self.rank:
            return
        write_json_atomic(folder / SCHEDULE, schedule_state(self.schedule))
        if self.scaler:
            write_json_atomic(folder / SCALER, self.scaler)
        write_json_atomic(folder / META, {**self.facts, **circumstances()})


def circumstances() -> dict[str, Any]:
    """Return what wrote the checkpoint, and when (UTC)."""
    return {
        "versions": {"drl": __version__, "torch": torch.__version__},
        "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
    }


def agree(action: Callable[[], None], group: dist.ProcessGroup | None) -> None:
    """Do something on every rank; when it fails on one, raise OSError on all of them; collective."""
    problem = None
    try:
        action()
    except Exception as error:  # the other ranks must hear of it, or they wait forever
        if group is None:
            raise
        problem = f"{type(error).__name__}: {error}"
    if group is None:
        return
    problems: list[str | None] = [None] * dist.get_world_size(group)
    dist.all_gather_object(problems, problem, group=group)
    for rank, found in enumerate(problems):
        if found:
            raise OSError(f"rank {rank}: {found}")


def shards_of(tensors: Mapping[str, Tensor]) -> dict[str, Shard]:
    """Return this rank's part of each tensor, sharing memory."""
    return {name: shard_of(tensor) for name, tensor in tensors.items()}


class Source:
    """A checkpoint folder that is being restored: what is in it, checked before anything is read."""

    def __init__(self, folder: Path, *, trust: bool = False) -> None:
        self.folder = folder
        self.trust = trust
        self.meta = read_table(folder / META)
        for name in ("next_rollout_id", "global_step", "bad_steps", "world_size"):
            if type(self.meta.get(name)) is not int:
                raise CheckpointError(f"{folder / META} has no whole number '{name}'")

    def metadata(self, part: str) -> Metadata:
        """Return the metadata of one part: "model", "optimizer" or "ema"."""
        return read_metadata(self.folder / part, trust=self.trust)

    def has(self, part: str) -> bool:
        """True when the checkpoint has this part."""
        return (self.folder / part).is_dir()

    def check(self, part: str, wanted: Mapping[str, Shard]) -> Metadata:
        """Return a part's metadata; CheckpointError when names or shapes are not those of ``wanted``."""
        metadata = self.metadata(part)
        shapes = {name: entry.size for name, entry in entries(metadata).items()}
        missing = sorted(wanted.keys() - shapes.keys())
        unexpected = sorted(shapes.keys() - wanted.keys())
        wrong = [
            f"{name}: {tuple(shapes[name])}, the model has {tuple(shard.shape)}"
            for name, shard in wanted.items()
            if name in shapes and shapes[name] != shard.shape
        ]
        if missing or unexpected or wrong:
            raise CheckpointError(
                f"{self.folder / part} does not fit this recipe's model: {len(missing)} missing "
                f"{missing[:3]}, {len(unexpected)} unexpected {unexpected[:3]}, {len(wrong)} of another "
                f"shape {wrong[:3]}\nuse the recipe that the checkpoint was made with"
            )
        return metadata

    def read(self, part: str, targets: Mapping[str, Shard], metadata: Metadata) -> None:
        """Read a part into memory that is in place."""
        read_tensors(self.folder / part, targets, metadata)

    def schedule(self, recipe: ScheduleSettings, choice: str) -> tuple[ScheduleSettings, list[str]]:
        """Return the schedule that holds, and lines that say where the recipe's does not.

        Raises CheckpointError for an unusable file, and when choice "equal" finds a difference.
        """
        if choice == "recipe":
            return recipe, []
        saved = read_table(self.folder / SCHEDULE)
        try:
            theirs = settings_from_state(saved)
        except CheckpointError as error:
            raise CheckpointError(f"{self.folder / SCHEDULE} is no schedule: {error}") from error
        ours = schedule_state(recipe)
        lines = [
            f"learning-rate schedule: {name} is {saved[name]!r} in the checkpoint, {ours[name]!r} in the recipe"
            for name in ours
            if saved[name] != ours[name]
        ]
        if lines and choice == "equal":
            raise CheckpointError(
                "\n".join(lines)
                + "\nset optimizer.use_checkpoint_lr_scheduler = true for the checkpoint's, or "
                "optimizer.override_lr_scheduler = true for the recipe's"
            )
        return theirs, [f"{line}; the checkpoint's holds" for line in lines]

    def scaler(self) -> dict[str, Any]:
        """Return the state of the loss scaler; empty when the run had none."""
        file = self.folder / SCALER
        return read_table(file) if file.is_file() else {}

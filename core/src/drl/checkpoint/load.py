"""Which checkpoint a run begins from: its own newest one, or another run's by ``checkpoint.load``."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any

from drl.checkpoint.folders import (
    TRACKER,
    checkpoints_in,
    folder_name,
    good,
    latest,
    number_of,
    tracked,
)
from drl.checkpoint.manifest import damage
from drl.checkpoint.meta import META, base_model, check_base
from drl.checkpoint.state import RestoreOptions
from drl.errors import CheckpointError


def checkpoints_of(run_dir: Path) -> Path:
    """Return the checkpoints folder of a run: ``checkpoint.save`` of its recipe, or its own."""
    recipe = run_dir / "recipe.toml"
    if recipe.is_file():
        try:
            section = tomllib.loads(recipe.read_text("utf-8")).get("checkpoint", {})
        except (OSError, ValueError) as error:
            raise CheckpointError(f"{recipe} cannot be read: {error}") from error
        if isinstance(section, dict) and isinstance(section.get("save"), str):
            return Path(section["save"])
    return run_dir / "checkpoints"


def find_checkpoint(path: Path, step: int | None = None) -> Path:
    """Return a whole checkpoint: ``path`` is one, a folder of them, or a run directory.

    ``step``: iterations done; the newest when None. Raises CheckpointError for what is missing or
    damaged, and names what is there.
    """
    if not path.is_dir():
        raise CheckpointError(
            f"there is no folder {path}; give a run directory, its checkpoints folder or one checkpoint"
        )
    if (path / META).is_file():
        return _one(path, step)
    root = path if is_checkpoints_folder(path) else checkpoints_of(path)
    found = checkpoints_in(root)
    if not found:
        raise CheckpointError(
            f"{path} has no checkpoints: neither {TRACKER} nor a folder iter_0000001 is in it or in {root}"
        )
    if step is None:
        return newest(root) or root / folder_name(tracked(root))
    if step not in found:
        raise CheckpointError(
            f"checkpoint.step = {step}: {root} has no {folder_name(step)}; it has "
            f"{', '.join(map(str, found))}"
        )
    return _whole(found[step], root)


def _one(folder: Path, step: int | None) -> Path:
    number = number_of(folder)
    if step is not None and number != step:
        raise CheckpointError(
            f"checkpoint.step = {step}, but checkpoint.load names {folder.name}; leave out the step, or "
            f"name {folder.parent}"
        )
    return _whole(folder, folder.parent)


def _whole(folder: Path, root: Path) -> Path:
    problem = damage(folder)
    if problem:
        raise CheckpointError(f"{folder} cannot be used: {problem}{good(root)}")
    return folder


def is_checkpoints_folder(path: Path) -> bool:
    """True for a folder that holds checkpoints itself."""
    return (path / TRACKER).is_file() or bool(checkpoints_in(path))


def newest(root: Path) -> Path | None:
    """Return the checkpoint that a run goes on from; None when it was stopped before its first one.

    The first folder has its name before the tracker is there to name it. Raises CheckpointError for a
    damaged one.
    """
    if (root / TRACKER).exists():
        return latest(root)
    found = list(checkpoints_in(root).values())
    return _whole(found[-1], root) if found else None


def check_loadable(folder: Path, recipe: Any) -> None:
    """Raise CheckpointError when a checkpoint cannot start this recipe's run; needs no weights."""
    check_base(folder, base_model(recipe.model.checkpoint, recipe.model.components))
    number = number_of(folder)
    if recipe.train.num_rollout == 0 or recipe.train.start_rollout_id is not None:
        return  # nothing is trained, or the recipe says where the run starts
    if number is not None and number >= recipe.train.num_rollout:
        raise CheckpointError(
            f"{folder} is the state after {number} iterations, and train.num_rollout = "
            f"{recipe.train.num_rollout} ends there or before; set it to the total number of iterations"
        )


def load_options(recipe: Any, *, loads: bool, trust: bool) -> RestoreOptions:
    """Return what of a checkpoint is taken. ``loads``: of another run; a resumed one has its own recipe."""
    checkpoint, optimizer = recipe.checkpoint, recipe.optimizer
    theirs = optimizer.use_checkpoint_lr_scheduler
    schedule = "checkpoint" if theirs else "equal"
    if optimizer.override_lr_scheduler or not loads:
        schedule = "recipe"
    return RestoreOptions(
        optimizer=checkpoint.load_optim,
        rng=checkpoint.load_rng,
        schedule=schedule,
        trust=trust,
    )

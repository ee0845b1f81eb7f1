"""When a run saves, and what it does once a checkpoint is in place.

The state is copied while training waits; files are written, hashed and renamed in the background, the
tracker last (``drl.checkpoint.saver``). What went wrong there is raised at the next save point.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Mapping
from concurrent.futures import Future
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from safetensors import SafetensorError

from drl.checkpoint.folders import clear_leftovers, folder_name, write_kept
from drl.checkpoint.meta import base_model, read_table
from drl.checkpoint.retention import Retention, best_of, prune, read_scores, write_score
from drl.checkpoint.saver import RUN_STATE, Save
from drl.errors import DrlError, Interrupted
from drl.stages.periodic import due

if TYPE_CHECKING:
    from drl.run import Run


def save_if_due(run: Run, rollout_id: int) -> None:
    """Save by iteration count, by time, at the end, and when the user asked to stop."""
    settle(run, wait=False)
    options = run.recipe.checkpoint
    minutes = (time.monotonic() - run.last_save) / 60
    asked = run.is_last(rollout_id) or run.stop.asked
    counted = due(run.recipe, rollout_id + 1, options.save_interval)
    timed = options.every_minutes and minutes >= options.every_minutes
    if asked or counted or timed:
        save(run, rollout_id)


def save_unless_saved(run: Run, rollout_id: int) -> None:
    """Save an iteration that was not due when its turn came."""
    if run.saved != rollout_id:
        save(run, rollout_id)


def leave(run: Run, rollout_id: int) -> NoReturn:
    """End the run between two iterations, as the user asked; whatever it has to go on from is saved."""
    done = f"stopped by {run.stop.reason} after iteration {rollout_id + 1}"
    if run.recipe.debug.rollout_only:
        raise Interrupted(f"{done}; debug.rollout_only keeps nothing to go on from")
    save_unless_saved(run, rollout_id)  # asked after this iteration's turn to save
    finish_saving(run)
    raise Interrupted(
        f"{done}; everything is saved\n"
        f"go on with: drl run RECIPE --resume --run-dir {run.directory.path}"
    )


def keep_checkpoint(run: Run, rollout_id: int, reason: str) -> None:
    """Make sure that an iteration has a checkpoint, and name it in ``kept.txt``."""
    save_unless_saved(run, rollout_id)
    write_kept(run.checkpoints, checkpoint_name(rollout_id), reason)


def keep_if_best(run: Run, done: int, figures: Mapping[str, float]) -> None:
    """Score the state after ``done`` iterations; among the best, it gets a checkpoint if it has none."""
    retention = retention_of(run.recipe)
    value = figures.get(retention.metric) if retention.metric is not None else None
    if value is None or not math.isfinite(value) or done == 0:
        return
    write_score(run.checkpoints, done, value)
    if done in best_of(read_scores(run.checkpoints), retention):
        save_unless_saved(run, done - 1)


def retention_of(recipe: Any) -> Retention:
    """Return which checkpoints of a run stay."""
    options = recipe.checkpoint
    return Retention(
        last=options.keep_last,
        best=options.keep_best,
        metric=options.best_metric,
        mode=options.best_mode,
    )


def checkpoint_name(rollout_id: int) -> str:
    """Return the folder name of the checkpoint after this iteration."""
    return folder_name(rollout_id + 1)


def save(run: Run, rollout_id: int) -> Path:
    """Begin to save an iteration and return its folder, which appears when it is whole.

    With ``checkpoint.asynchronous = false`` it is there on return. Raises DrlError for a save, this one
    or the one before, that could not be written; it says what is left.
    """
    settle(run, wait=True)
    final = run.checkpoints / checkpoint_name(rollout_id)
    state = run.state(rollout_id)
    with run.phases.phase("save_block"):
        try:
            begin(run, final, state)
        except (OSError, SafetensorError) as error:
            raise unwritten(final, error) from error
    run.saved, run.last_save = rollout_id, time.monotonic()
    if not run.recipe.checkpoint.asynchronous:
        settle(run, wait=True)
    return final


def begin(run: Run, final: Path, state: dict[str, Any]) -> None:
    """Let the trainer copy, or at once write, its state; the saver finishes the rest."""
    recipe = run.recipe
    save = Save(
        final=final,
        state=json.dumps(state, indent=2, sort_keys=True) + "\n",
        base=lambda: base_model(recipe.model.checkpoint, recipe.model.components),
        adapters=run.trainer.adapters(),
        adapter_folder=run.directory.adapter,
        base_model=recipe.model.checkpoint,
        retention=retention_of(recipe),
    )
    save.open()
    try:
        if recipe.checkpoint.asynchronous:
            written = run.trainer.begin_save(save.beside)
        else:
            run.trainer.save(save.beside)
            written = Future()
            written.set_result(None)
    except BaseException:
        save.drop()
        raise
    run.saver.begin(save, written)


def settle(run: Run, *, wait: bool) -> None:
    """Take note of a save that has ended: tell user and plugins, or raise what went wrong in it."""
    under_way = run.saver.current
    try:
        with run.phases.phase("save_block") if wait else nullcontext():
            finished = run.saver.take(wait=wait)
    except (OSError, SafetensorError) as error:
        assert under_way is not None
        raise unwritten(under_way, error) from error
    if finished is None:
        return
    run.phases.overlap("save", finished.seconds)
    run.hooks.drl_checkpoint_saved(run=run, path=finished.final)
    gone = f"; deleted {', '.join(finished.removed)}" if finished.removed else ""
    run.event(f"saved {finished.final.name}{gone}")


def finish_saving(run: Run) -> None:
    """Wait for the save that is under way, and let the last scores decide what stays."""
    settle(run, wait=True)
    removed = prune(run.checkpoints, retention_of(run.recipe))
    if removed:
        run.event(f"deleted {', '.join(removed)}")


def tidy(run: Run) -> None:
    """Delete what a killed process was about to, or had begun to."""
    clear_leftovers(run.checkpoints)
    prune(run.checkpoints, retention_of(run.recipe))


def unwritten(final: Path, error: Exception) -> DrlError:
    """Return the error of a save that the disk refused."""
    return DrlError(
        f"checkpoint {final.name} could not be written: {error}\nearlier checkpoints in "
        f"{final.parent} are untouched; make room there, then go on with --resume"
    )


def read_run_state(folder: Path) -> dict[str, Any]:
    """Return the run's own part of a checkpoint."""
    return read_table(folder / RUN_STATE)

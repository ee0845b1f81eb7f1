"""Where a run starts and how long it is: epochs to iterations, and a chosen first iteration."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from drl.checkpoint.folders import folder_name
from drl.checkpoint.saver import RUN_STATE
from drl.errors import BadInput
from drl.stages.save import read_run_state

if TYPE_CHECKING:
    from drl.config.recipe import Recipe
    from drl.interfaces.data import DataSource
    from drl.run import Run


def counted_in_iterations(recipe: Recipe, source: DataSource) -> Recipe:
    """Return a recipe whose length in epochs is one in iterations, ``epochs * (rows // batch_size)``.

    Raises BadInput for data without an end, and for fewer rows than a batch.
    """
    rows, prompts = source.rows(), recipe.rollout.batch_size
    name, epochs = recipe.data.source, recipe.train.num_epoch
    assert epochs is not None
    if rows is None:
        raise BadInput(
            f"train.num_epoch = {epochs}, but data.source '{name}' has no end; give train.num_rollout"
        )
    per_epoch = rows // prompts
    if per_epoch == 0:
        raise BadInput(
            f"train.num_epoch = {epochs}, but {rows} rows of data.source '{name}' are fewer than "
            f"rollout.batch_size = {prompts}; lower it, or give train.num_rollout"
        )
    count = epochs * per_epoch
    first = recipe.train.start_rollout_id or 0
    if first >= count:
        raise BadInput(
            f"train.start_rollout_id = {first}, but {epochs} epochs are iterations 0 to {count - 1}"
        )
    steps = count * (recipe.train.num_steps_per_rollout or 1)
    decay = recipe.optimizer.lr_decay_iters or steps
    return replace(
        recipe,
        train=recipe.train.model_copy(update={"num_rollout": count}),
        optimizer=recipe.optimizer.model_copy(update={"lr_decay_iters": decay}),
        rollouts_per_epoch=per_epoch,
    )


def chosen_start(run: Run, folder: Path, state: Mapping[str, Any]) -> Mapping[str, Any]:
    """Go to the iteration that the recipe chose, and return the run state whose data position counts.

    That is the checkpoint's own, or that of its neighbour before the chosen iteration; without such a
    neighbour the data begin anew (its ``data`` is None).
    """
    first = run.recipe.train.start_rollout_id
    if first is None or first == run.first_rollout:
        return state
    run.remarks.append(
        f"train.start_rollout_id = {first} wins over iteration {run.first_rollout} of {folder}"
    )
    run.first_rollout = first
    neighbour = folder.parent / folder_name(first)
    if first > 0 and (neighbour / RUN_STATE).is_file():
        return read_run_state(neighbour)
    return {**state, "data": None}

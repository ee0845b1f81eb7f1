"""Dumps: rollouts, evaluations and what ranks train on, as files of ``drl.dumps``; only where asked for."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from drl.config.places import file_of
from drl.dumps import write_dump
from drl.errors import BadInput
from drl.stages.rollout import training_sampling

if TYPE_CHECKING:
    from drl.run import Run
    from drl.types import EvaluationReport, Pair, Rollout, Shard

ROLLOUT, EVALUATION, SHARD = "rollout", "evaluation", "shard"
"""Kinds of files."""


def dump_rollout(run: Run, rollout: Rollout) -> None:
    """Write the scored and filtered groups of an iteration, with the settings that they were made with."""
    template = run.recipe.debug.save_rollout_data
    if template is None:
        return
    with run.phases.phase("dump"):
        content = {
            "rollout_id": rollout.rollout_id,
            "weights": rollout.version,
            "settings": training_sampling(run.recipe) if run.needs_rollout else None,
            "groups": rollout.groups,
            "dropped": dict(rollout.dropped),
            "metrics": dict(rollout.metrics),
            "logged": rollout.logged,
        }
        write_dump(file_of(template, rollout_id=rollout.rollout_id), ROLLOUT, content)


def dump_evaluation(run: Run, report: EvaluationReport) -> None:
    """Write the samples of an evaluation; its file has the number of iterations done in its name."""
    template = run.recipe.debug.save_rollout_data
    if template is None:
        return
    sets = {name: list(samples) for name, samples in report.samples.items()}
    content = {"done": report.rollout_id, "weights": report.version, "sets": sets}
    write_dump(file_of(template, rollout_id=f"eval_{report.rollout_id}"), EVALUATION, content)


def dump_shards(run: Run, shards: Sequence[Shard]) -> None:
    """Write what each rank trains on: its pairs, and by their numbers its windows of micro-batches."""
    template = run.recipe.debug.save_train_data
    if template is None:
        return
    with run.phases.phase("dump"):
        for rank, shard in enumerate(shards):
            path = file_of(template, rollout_id=shard.rollout_id, rank=rank)
            write_dump(path, SHARD, {"rank": rank, **table_of(shard)})


def table_of(shard: Shard) -> dict[str, Any]:
    """Return a shard as a table in which each pair stands once, whatever number of rows shows it."""
    numbers: dict[int, int] = {}
    pairs: list[Pair] = []
    windows = []
    for window in shard.windows:
        batches = []
        for batch in window:
            for pair in batch:
                if id(pair) not in numbers:
                    numbers[id(pair)] = len(pairs)
                    pairs.append(pair)
            batches.append([numbers[id(pair)] for pair in batch])
        windows.append(batches)
    return {
        "rollout_id": shard.rollout_id,
        "window_weights": list(shard.window_weights),
        "windows": windows,
        "pairs": pairs,
    }


def check_dump_files(recipe: Any, first: int) -> None:
    """Raise BadInput when a new run would write over dumps that are there already."""
    there = [path for path in files_to_write(recipe, first) if path.exists()]
    if there:
        raise BadInput(
            f"{there[0]} exists already, and a new run writes over nothing ({len(there)} such files); name "
            "another place in [debug] (save_rollout_data, save_train_data or dump_details)"
        )


def files_to_write(recipe: Any, first: int) -> Iterator[Path]:
    """Yield every file that a run from iteration ``first`` on may write."""
    debug, last = recipe.debug, recipe.train.num_rollout
    for number in range(first, last + 1):
        if debug.save_rollout_data is not None:
            yield file_of(debug.save_rollout_data, rollout_id=f"eval_{number}")
        if number < last and debug.save_rollout_data is not None:
            yield file_of(debug.save_rollout_data, rollout_id=number)
        if number < last and debug.save_train_data is not None:
            yield file_of(debug.save_train_data, rollout_id=number, rank=0)

"""Rules about prompts, evaluation sets and the files behind them."""

from __future__ import annotations

from collections.abc import Iterator

from drl.config.draft import Draft
from drl.config.places import is_blank, is_file, is_folder
from drl.errors import Problem


def prompt_file(draft: Draft) -> Iterator[Problem]:
    """The jsonl source reads a file, and a file that is named must exist."""
    path, source = draft.get("data.prompt_data"), draft.get("data.source")
    if path is None:
        if source == "jsonl":
            yield Problem(
                "data.prompt_data", "is required by data.source 'jsonl': a .jsonl file of prompts"
            )
    elif not is_file(path) and not is_folder(path):
        yield Problem("data.prompt_data", f"there is no file {path}")
    elif source == "jsonl" and not is_file(path):
        yield Problem("data.prompt_data", f"{path} is a folder; data.source 'jsonl' reads a file")
    elif source == "jsonl" and path.suffix != ".jsonl":
        yield Problem(
            "data.prompt_data", f"must end in .jsonl, one JSON object per line; got {path.name!r}"
        )
    elif source == "jsonl" and is_blank(path):
        yield Problem("data.prompt_data", f"{path} is empty; give one row per prompt")


def evaluation_files(draft: Draft) -> Iterator[Problem]:
    """The files of the evaluation sets exist and hold something."""
    for number, dataset in enumerate(draft.get("eval.datasets")):
        if not is_file(dataset.path):
            yield Problem(f"eval.datasets[{number}].path", f"there is no file {dataset.path}")
        elif is_blank(dataset.path):
            yield Problem(
                f"eval.datasets[{number}].path", f"{dataset.path} is empty; give one row per prompt"
            )


def evaluation_sets(draft: Draft) -> Iterator[Problem]:
    """An interval asks for something to evaluate."""
    interval = draft.get("eval.interval")
    if interval and not draft.get("eval.datasets") and draft.get("eval.function") is None:
        yield Problem(
            "eval.interval",
            f"is {interval}, but there is nothing to evaluate: give eval.datasets a list of "
            "{name, path}, or set it to 0",
        )


def evaluation_of_supervised_runs(draft: Draft) -> Iterator[Problem]:
    """A supervised run has no engine that could evaluate."""
    if draft.get("train.train_only") and draft.get("eval.datasets"):
        yield Problem(
            "eval.datasets",
            "are not evaluated: train.train_only runs without an engine",
            "warning",
        )


DATA_RULES = (prompt_file, evaluation_files, evaluation_sets, evaluation_of_supervised_runs)

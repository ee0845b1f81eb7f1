"""Where prompts come from when the recipe says it in another way: a file of held-out sets, or not at all."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from drl.config.draft import Draft
from drl.config.files import read_override
from drl.config.layers import AUTO, Layer, Source
from drl.config.messages import did_you_mean, shown
from drl.config.places import is_file
from drl.errors import Problem

BLANK = "blank"
SUFFIXES = (".yaml", ".yml", ".json")
FORMER_KEYS = {"n_samples_per_eval_prompt": "n_samples_per_prompt"}


def choose_source(draft: Draft) -> None:
    """Take blank prompts when the recipe asks for no data set and names no source of its own."""
    if not draft.get("data.global_dataset") and not draft.given("data.source"):
        draft.put("data.source", BLANK, AUTO)


def with_evaluation_file(layers: Sequence[Layer]) -> tuple[list[Layer], list[Problem]]:
    """Return the layers with the sets of ``eval.config`` on top, in the place of that option.

    The resolved recipe holds the sets themselves, so that it means the same when the file changes. Raises
    RecipeError for a file that cannot be parsed; other mistakes come back as problems.
    """
    owner = next((layer for layer in reversed(layers) if _named(layer) is not None), None)
    if owner is None:
        return list(layers), []
    path = owner.base / os.path.expanduser(str(_named(owner)))
    line = owner.line("eval.config") if owner.source is Source.RECIPE else None
    rest = [_without(layer) for layer in layers]
    if path.suffix not in SUFFIXES or not is_file(path):
        wrong = (
            f"there is no file {path}"
            if path.suffix in SUFFIXES
            else f"{path.name} must end in {', '.join(SUFFIXES)}"
        )
        return rest, [Problem("eval.config", wrong, line=line)]
    rows, mistakes = rows_of(read_override(path).values)
    problems = [Problem("eval.config", f"{path.name}: {text}", line=line) for text in mistakes]
    if any("datasets" in layer.values.get("eval", {}) for layer in rest if _is_table(layer)):
        problems.append(
            Problem("eval.datasets", f"are not used: eval.config {path.name} wins", "warning")
        )
    top = Layer(
        source=Source.OVERRIDE,
        origin=path.name,
        values={"eval": {"datasets": rows}},
        base=path.parent.resolve(),
    )
    return [*(_without(layer, "datasets") for layer in rest), top], problems


def _is_table(layer: Layer) -> bool:
    return isinstance(layer.values.get("eval"), Mapping)


def _named(layer: Layer) -> str | None:
    """Return the file that a layer names; what is no text is left to the type check."""
    value = layer.values["eval"].get("config") if _is_table(layer) else None
    return value if isinstance(value, str) and value else None


def _without(layer: Layer, key: str = "config") -> Layer:
    if not _is_table(layer) or (key == "config" and _named(layer) is None):
        return layer
    table = {name: value for name, value in layer.values["eval"].items() if name != key}
    return replace(layer, values={**layer.values, "eval": table})


def rows_of(values: Mapping[str, Any]) -> tuple[list[Any], list[str]]:
    """Return the sets of a file as rows of ``eval.datasets``, and what is wrong with the file.

    ``eval.datasets`` is a list of tables, or a table of sets by name; ``eval.defaults`` fills what a set
    leaves out. What is in a set is checked where the rows are.
    """
    table = values.get("eval")
    if set(values) != {"eval"} or not isinstance(table, Mapping):
        return [], ["must hold one table, 'eval', with 'datasets' and maybe 'defaults'"]
    unknown = [
        f"eval.{key} is unknown{did_you_mean(key, ['datasets', 'defaults'])}"
        for key in table
        if key not in {"datasets", "defaults"}
    ]
    sets, defaults = table.get("datasets"), table.get("defaults") or {}
    if not isinstance(defaults, Mapping):
        return [], [*unknown, f"eval.defaults must be a table, got {shown(defaults)}"]
    if not isinstance(sets, (list, Mapping)) or not sets:
        return [], [*unknown, "eval.datasets must be a list of sets, or sets by name, at least one"]
    if isinstance(sets, Mapping):
        sets = [
            {"name": name, **(one if isinstance(one, Mapping) else {"path": one})}
            for name, one in sets.items()
        ]
    return [_row(one, defaults) for one in sets], unknown


def _row(one: Any, defaults: Mapping[str, Any]) -> Any:
    if not isinstance(one, Mapping):
        return one  # the type check says it
    merged = {**defaults, **one}
    return {FORMER_KEYS.get(key, key): value for key, value in merged.items()}

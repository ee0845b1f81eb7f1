"""Check values against an option model, report in our words, and repair so that checking goes on."""

from __future__ import annotations

import os
import types
import typing
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic import BaseModel, SecretStr, ValidationError
from pydantic_core import ErrorDetails

from drl.config.draft import Draft
from drl.config.messages import did_you_mean, explain_error, help_of, mixed_up
from drl.options import Options


def checked(draft: Draft, model: type[Options], values: Mapping[str, Any], path: str) -> Any:
    """Return an instance of ``model``, or None when even a repaired one cannot be made.

    Wrong values are reported, their paths marked as bad, and replaced by the field's default.
    """
    given = {key: absolute(draft, model, path, key, value) for key, value in values.items()}
    instance, errors = _attempt(model, given)
    wrong = _report(draft, model, path, errors)
    if instance is not None:
        wrong = _report_mixed_up(draft, instance, given, path)
    if not wrong:
        return instance
    kept = {key: value for key, value in given.items() if key not in wrong}
    return _attempt(model, {**placeholders(model, path), **kept})[0]


def _attempt(
    model: type[Options], values: Mapping[str, Any]
) -> tuple[Options | None, Sequence[ErrorDetails]]:
    try:
        return model.model_validate(dict(values)), ()
    except ValidationError as error:
        return None, error.errors(include_url=False)


def placeholders(model: type[Options], path: str) -> dict[str, Any]:
    """Return stand-ins for required options of core, used only after their absence was reported."""
    known = {"model.checkpoint": "?", "rollout.batch_size": 1}
    return {key: known[f"{path}.{key}"] for key in model.model_fields if f"{path}.{key}" in known}


def _report(
    draft: Draft, model: type[Options], path: str, errors: Sequence[ErrorDetails]
) -> set[str]:
    """Report pydantic's errors, one per option; return the keys that are wrong."""
    wrong: set[str] = set()
    seen: set[str] = set()
    for error in errors:
        location, inner = _location(model, error["loc"])
        place = _written(path, location)
        key = str(location[0]) if location else ""
        wrong.add(key)
        misspelt = error["type"] == "missing" and place in draft.bad
        if place in seen or misspelt:
            continue  # the other members of a union, or reported under the name that was written
        seen.add(place)
        draft.bad.add(f"{path}.{key}" if key else path)
        draft.problem(place, _message(model, inner, key, error))
    return wrong


def _message(model: type[Options], inner: type[BaseModel], key: str, error: ErrorDetails) -> str:
    if error["type"] == "extra_forbidden":
        return f"unknown option{did_you_mean(str(error['loc'][-1]), list(inner.model_fields))}"
    if error["type"] == "missing":
        name = str(error["loc"][-1])
        described = help_of(inner, name) if issubclass(inner, Options) else ""
        return f"is required: {described}" if described else "is required"
    if key in secret_keys(model):
        return "must be text"
    field = model.model_fields.get(key)
    extra = field.json_schema_extra if field is not None else None
    later = extra.get("later", ()) if isinstance(extra, dict) else ()
    return explain_error(error, [str(value) for value in later])  # type: ignore[union-attr]


def _location(
    model: type[BaseModel], location: tuple[int | str, ...]
) -> tuple[tuple[int | str, ...], type[BaseModel]]:
    """Return a location without the names of union members, and the model that holds its last key."""
    kept: list[int | str] = []
    inner: type[BaseModel] | None = model
    holder = model
    for step in location:
        if isinstance(step, int):
            kept.append(step)
        elif inner is not None:
            holder, field = inner, inner.model_fields.get(step)
            kept.append(step)
            inner = _model_in(field.annotation) if field is not None else None
        elif not kept:
            kept.append(step)
    return tuple(kept), holder


def _model_in(annotation: Any) -> type[BaseModel] | None:
    """Return the option model that an annotation contains, as in ``tuple[Term, ...]``."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    found = (_model_in(inner) for inner in typing.get_args(annotation))
    return next((model for model in found if model is not None), None)


def _written(path: str, location: Sequence[int | str]) -> str:
    steps = (f"[{step}]" if isinstance(step, int) else f".{step}" for step in location)
    return path + "".join(steps)


def _report_mixed_up(
    draft: Draft, instance: Options, given: Mapping[str, Any], path: str
) -> set[str]:
    """Report scalars that pydantic took although their type is another."""
    wrong = set()
    for key, value in given.items():
        message = mixed_up(value, vars(instance).get(key))
        if message is not None:
            draft.error(f"{path}.{key}", message)
            wrong.add(key)
    return wrong


def holds(annotation: Any, wanted: type) -> bool:
    """True when an annotation is a type, also inside a union with None and with a validator."""
    if typing.get_origin(annotation) is typing.Annotated:
        return holds(typing.get_args(annotation)[0], wanted)
    if typing.get_origin(annotation) in {typing.Union, types.UnionType}:
        return any(holds(inner, wanted) for inner in typing.get_args(annotation))
    return isinstance(annotation, type) and issubclass(annotation, wanted)


def secret_keys(model: type[Options]) -> set[str]:
    """Return the options whose value must never be shown."""
    return {key for key, field in model.model_fields.items() if holds(field.annotation, SecretStr)}


def absolute(draft: Draft, model: type[Options], path: str, key: str, value: Any) -> Any:
    """Return a relative file of an option as an absolute path, seen from the file that names it."""
    field = model.model_fields.get(key)
    owner = draft.tree.owner(f"{path}.{key}")
    if field is None or owner is None:
        return value
    inner = _model_in(field.annotation)
    if inner is not None and isinstance(value, list):
        files = [k for k, f in inner.model_fields.items() if holds(f.annotation, Path)]
        return [_rows_absolute(owner.base, row, files) for row in value]
    if holds(field.annotation, Path):
        return _joined(owner.base, value)
    return value


def _rows_absolute(base: Path, row: Any, files: Sequence[str]) -> Any:
    if not isinstance(row, dict):
        return row
    return {key: _joined(base, v) if key in files else v for key, v in row.items()}


def _joined(base: Path, value: Any) -> Any:
    """Join a path to its base; "" and what is no text is left to the type check."""
    if not isinstance(value, str) or not value:
        return value
    # os.path.expanduser leaves "~stranger" alone, Path.expanduser raises.
    return str(base / os.path.expanduser(value))

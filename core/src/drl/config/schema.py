"""JSON schema of a recipe, for editors that complete and check TOML; knows the installed plugins."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from drl.config.describe import without_null
from drl.config.fields import Section
from drl.config.sections import SECTIONS
from drl.errors import BrokenPlugin
from drl.kinds import FUNCTION, KINDS, SLOTS

if TYPE_CHECKING:
    from drl.catalog import Catalog
    from drl.options import Options

BY_PATH = {"pattern": r"^[A-Za-z_][\w.]*:[A-Za-z_]\w*$"}
"""What an editor takes besides the names of the installed components."""

_FILES = {"type": "array", "items": {"type": "string"}}


def recipe_schema(catalog: Catalog) -> dict[str, Any]:
    """Return the JSON schema (2020-12) of a recipe file.

    Nothing is required in it, because included files and ``--set`` may give what a file leaves out.
    """
    definitions: dict[str, Any] = {}
    sections = {
        name: _section(name, model, catalog, definitions) for name, model in SECTIONS.items()
    }
    include = {
        "type": "object",
        "description": "Recipes that this one is based on; later ones win, this one wins over all.",
        "properties": {"files": _FILES},
        "additionalProperties": False,
    }
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "drl recipe",
        "type": "object",
        "properties": {"include": include, **sections},
        "additionalProperties": False,
        "$defs": definitions,
    }


def _section(
    name: str, model: type[Section], catalog: Catalog, definitions: dict[str, Any]
) -> dict[str, Any]:
    schema = _table(model, definitions)
    for kind in KINDS:
        if kind.section != name:
            continue
        key = kind.option.partition(".")[2]
        if key in schema["properties"] and kind.name != "logger":
            automatic = ["auto"] if kind.name == "updater" else []
            names = [*automatic, *catalog.names(kind.name)]
            schema["properties"][key]["anyOf"] = [{"enum": names}, BY_PATH]
        for component, options in _models(catalog, kind.name):
            schema["properties"][component] = (
                _table(options, definitions)
                if options is not None
                else {"type": "object", "maxProperties": 0}
            )
    for slot in SLOTS:
        section, _, key = slot.option.partition(".")
        if section == name:
            names = catalog.names(FUNCTION, slot.option)
            schema["properties"][key]["anyOf"] = [{"enum": names}, BY_PATH]
    if name == "reward":  # a term may have any name
        schema["additionalProperties"] = {"type": "object"}
    return schema


def _models(catalog: Catalog, kind: str) -> Iterator[tuple[str, type[Options] | None]]:
    for name in catalog.names(kind):
        try:
            yield name, catalog.options_model(kind, name)
        except BrokenPlugin:
            continue  # its options cannot be known, and `drl plugins list` says why


def _table(model: type[Options], definitions: dict[str, Any]) -> dict[str, Any]:
    schema = model.model_json_schema()
    definitions |= schema.pop("$defs", {})
    schema.pop("required", None)
    schema["properties"] = {
        k: without_null(rule) for k, rule in schema.get("properties", {}).items()
    }
    return schema

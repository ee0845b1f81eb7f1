"""Read recipe files: TOML with includes, and override files in TOML, YAML or JSON."""

from __future__ import annotations

import datetime
import re
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from drl.config.layers import Layer, Source
from drl.config.lines import line_numbers
from drl.errors import Problem, RecipeError

_AT_LINE = re.compile(r"\s*\(at line (\d+), column (\d+)\)")
_MAX_DEPTH = 20


def read_recipe(path: Path) -> list[Layer]:
    """Return the layers of a recipe file: what it includes, in order, and then itself.

    Raises RecipeError for files that cannot be read or parsed, and for includes that form a cycle.
    """
    return list(_with_includes(path, path.name, ()))


def _with_includes(path: Path, shown: str, above: tuple[Path, ...]) -> Iterator[Layer]:
    text = _text(path, shown)  # first: a path that cannot be read may be no path at all
    real = path.resolve()
    if real in above:
        chain = " -> ".join(step.name for step in (*above, real))
        raise _unreadable(
            above[0].name, Problem("include.files", f"includes form a cycle: {chain}")
        )
    values = _toml(text, shown)
    lines = line_numbers(text)
    files = _included(values.pop("include", {"files": []}), shown, lines)
    for file in files:
        yield from _with_includes(path.parent / file, file, (*above, real))
    source = Source.INCLUDE if above else Source.RECIPE
    yield Layer(source=source, origin=shown, values=values, base=path.parent.resolve(), lines=lines)


def _included(table: Any, shown: str, lines: dict[str, int]) -> list[str]:
    """Return the files of the [include] table, or raise with what is wrong with it."""
    line = lines.get("include.files", lines.get("include"))
    files = table.get("files") if isinstance(table, dict) else None
    names = [str(file) for file in files if file] if isinstance(files, list) else []
    if isinstance(files, list) and set(table) == {"files"} and names == files:
        return names
    message = 'must have one key, files, with a list of file names: files = ["base.toml"]'
    raise _unreadable(shown, Problem("include", message, line=line))


def read_override(path: Path) -> Layer:
    """Return the layer of an override file; RecipeError when it cannot be read or parsed."""
    text = _text(path, path.name)
    if path.suffix == ".toml":
        values, lines = _toml(text, path.name), line_numbers(text)
    elif path.suffix in {".yaml", ".yml", ".json"}:
        values, lines = _yaml(text, path.name), {}
    else:
        raise _unreadable(
            path.name, Problem("", "an override file ends in .toml, .yaml, .yml or .json")
        )
    return Layer(
        source=Source.OVERRIDE,
        origin=path.name,
        values=values,
        base=path.parent.resolve(),
        lines=lines,
    )


def _unreadable(source: str, problem: Problem) -> RecipeError:
    return RecipeError(source, (problem,))


def _text(path: Path, shown: str) -> str:
    try:
        return path.read_text("utf-8-sig")
    except UnicodeDecodeError as error:
        message = f"is not UTF-8 text (byte {error.start}); save it as UTF-8"
        raise _unreadable(shown, Problem("", message)) from None
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else str(error)
        message = f"cannot read {path}: {reason}"
        raise _unreadable(shown, Problem("", message)) from None


def _toml(text: str, shown: str) -> dict[str, Any]:
    try:
        values: dict[str, Any] = plain(tomllib.loads(text))
    except (ValueError, RecursionError) as error:
        reason = str(error) if isinstance(error, ValueError) else "tables are nested too deeply"
        place = _AT_LINE.search(reason)
        message = f"is not valid TOML: {_AT_LINE.sub('', reason)}"
        line = int(place[1]) if place else None
        raise _unreadable(shown, Problem("", message, line=line)) from None
    return values


def _yaml(text: str, shown: str) -> dict[str, Any]:
    import yaml

    from drl.config.yaml_loader import RecipeLoader

    try:
        values = yaml.load(text, Loader=RecipeLoader)  # derives from SafeLoader
        tree = plain({} if values is None else values)
    except (yaml.YAMLError, ValueError, TypeError, RecursionError) as error:
        reason = str(error) or type(error).__name__
        raise _unreadable(shown, Problem("", f"is not valid YAML: {reason}")) from None
    if not isinstance(tree, dict):
        raise _unreadable(shown, Problem("", "must hold sections, as a recipe does"))
    return tree


def plain(value: Any, depth: int = 0) -> Any:
    """Return tables, lists and scalars only; ValueError for what a recipe cannot hold.

    Dates become text, because no option is a date and names often look like one.
    """
    if depth > _MAX_DEPTH:
        raise ValueError(f"tables are nested deeper than {_MAX_DEPTH}")
    if isinstance(value, dict):
        for key in value:
            if not isinstance(key, str) or not key or "." in key:
                raise ValueError(f"{key!r} cannot be the name of an option")
            _encodable(key)
        return {key: plain(inner, depth + 1) for key, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(inner, depth + 1) for inner in value]
    if isinstance(value, (datetime.date, datetime.time)):
        return value.isoformat()
    if isinstance(value, str):
        _encodable(value)
    elif value is not None and not isinstance(value, (bool, int, float)):
        raise ValueError(f"a recipe cannot hold a value like {value!r}")
    return value


def _encodable(text: str) -> None:
    """Refuse text that no file can hold."""
    if any("\ud800" <= letter <= "\udfff" for letter in text):
        raise ValueError(f"{text!a} is not valid text")

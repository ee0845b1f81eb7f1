"""``--set a.b=c``: the right side is a TOML value, or plain text when it is none."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from drl.config.files import plain
from drl.config.layers import Layer, Source, nested
from drl.errors import Problem

_PATH = re.compile(r"[A-Za-z0-9_-]+(\.[A-Za-z0-9_-]+)+")
ORIGIN = "--set"


def parse_value(text: str) -> Any:
    """Return the TOML value that ``text`` is, else ``text`` itself; dates stay text.

    Raises ValueError for text that no recipe file can hold.
    """
    try:
        table = tomllib.loads(f"value = {text}")
    except (ValueError, RecursionError):
        table = {}
    # A line break could smuggle in a second key.
    value = table["value"] if set(table) == {"value"} else text
    plain_value = plain(value)
    return text if isinstance(plain_value, str) and not isinstance(value, str) else plain_value


def parse_setting(setting: str) -> tuple[str, Any]:
    """Return (dotted path, value) of ``path=value``; ValueError says what is wrong."""
    path, equals, text = setting.partition("=")
    path = path.strip()
    if not equals:
        raise ValueError(f"{setting!r} has no '='; write it as section.option=value")
    if not _PATH.fullmatch(path):
        raise ValueError(f"{path!r} is not the path of an option; write it as section.option=value")
    return path, parse_value(text.strip())


def set_layers(settings: Sequence[str]) -> tuple[list[Layer], list[Problem]]:
    """Return one layer per setting, in order, and what cannot be parsed."""
    layers, problems = [], []
    for setting in settings:
        try:
            path, value = parse_setting(setting)
        except ValueError as error:
            problems.append(Problem(ORIGIN, str(error)))
            continue
        values = nested([(path, value)])
        layers.append(Layer(source=Source.SET, origin=ORIGIN, values=values, base=Path.cwd()))
    return layers, problems

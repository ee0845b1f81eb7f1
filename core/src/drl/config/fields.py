"""Field types that several sections share."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated, Any

from pydantic import AfterValidator, BeforeValidator

from drl.dotted import is_dotted
from drl.options import Field, Options

_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([KMG]i?B|B)", re.IGNORECASE)
_UNITS = {
    "b": 1,
    "kb": 10**3,
    "mb": 10**6,
    "gb": 10**9,
    "kib": 2**10,
    "mib": 2**20,
    "gib": 2**30,
}


class Section(Options):
    """Base of the recipe's sections."""


def split_commas(value: Any) -> Any:
    """Turn "a, b" into a list; anything else is left to the type check."""
    if isinstance(value, str):
        return [part.strip() for part in value.split(",")]
    return value


def bytes_from_text(value: Any) -> Any:
    """Turn "2GiB" into 2147483648; anything else is left to the type check."""
    match = _SIZE.fullmatch(value.strip()) if isinstance(value, str) else None
    if match is None:
        return value
    return int(float(match[1]) * _UNITS[match[2].lower()])


def unique(values: tuple[str, ...]) -> tuple[str, ...]:
    """Refuse a list that names something twice or names nothing; ValueError says which."""
    for number, value in enumerate(values):
        if not value:
            raise ValueError("must not contain an empty name")
        if value in values[:number]:
            raise ValueError(f"must not contain {value!r} twice")
    return values


Names = Annotated[tuple[str, ...], BeforeValidator(split_commas), AfterValidator(unique)]
"""Names, written as a list or as one string with commas."""

_REGEX = re.compile(r"[\\^$*+?()\[\]{}|]")


def module_spec(value: Any) -> Any:
    """Turn "a, b" into a list; "all-linear" and text with signs of a regular expression stay text."""
    if not isinstance(value, str) or value.lower() == "all-linear" or _REGEX.search(value):
        return value
    return split_commas(value)


def pairs(value: Any) -> Any:
    """Turn a table into a list of its pairs; anything else is left to the type check."""
    return list(value.items()) if isinstance(value, dict) else value


def init_name(value: Any) -> Any:
    """Return drl's names for what PEFT writes as true and false."""
    return {True: "kaiming-uniform", False: "random"}[value] if isinstance(value, bool) else value


ModuleSpec = Annotated[
    Annotated[tuple[str, ...], Field(min_length=1), AfterValidator(unique)] | str,
    BeforeValidator(module_spec),
]
"""Modules: names as a list or as one string with commas, or one regular expression."""

ByteCount = Annotated[int, BeforeValidator(bytes_from_text)]
"""A number of bytes, or text such as "512MiB"."""


def named_file(value: object) -> object:
    """Refuse "", which would be the folder that the command is run in."""
    if value == "":
        raise ValueError("must name a file or folder; leave the option out for none")
    return value


InputFile = Annotated[Path, BeforeValidator(named_file)]
"""A file to read; relative paths start at the file that names them."""

PlainName = Annotated[str, Field(pattern=r"^[a-z][a-z0-9_]*$")]
"""A name that becomes a table of the recipe."""

_PICK = re.compile(r"[a-z][a-z0-9_]*")


def picked(value: str) -> str:
    """Refuse what is neither a registered name nor a dotted path, with a ValueError."""
    if _PICK.fullmatch(value) or is_dotted(value):
        return value
    module, _, name = value.rpartition(".")
    meant = f"{module}:{name}"
    hint = f"; did you mean '{meant}'?" if is_dotted(meant) else ""
    raise ValueError(f'must be a name in lower_snake or a path "package.module:name"{hint}')


ComponentName = Annotated[str, AfterValidator(picked)]
"""What a recipe writes to pick a component: a registered name, or ``package.module:Class``."""


def dotted(value: str) -> str:
    """Refuse what is no dotted path, with a ValueError."""
    if is_dotted(picked(value)):
        return value
    raise ValueError('must be a path "package.module:Class"')


DottedPath = Annotated[str, AfterValidator(dotted)]
"""``package.module:name``, where no name is registered."""

FunctionName = Annotated[str, AfterValidator(picked)]
"""What a recipe writes to fill a slot: a registered name, or ``package.module:function``."""

MAX_SEED = 2**63 - 1

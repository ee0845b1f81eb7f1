"""The known options: ``flags.toml``, who owns each and since which release. Imports no pydantic."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

RELEASE = "0.1"
CORE = "drl-core"


@dataclass(frozen=True, slots=True, kw_only=True)
class Known:
    """One row of ``flags.toml``; ``flag`` is empty for the keys under [extra]."""

    key: str
    owner: str
    since: str
    flag: str = ""
    value: str = ""
    was: str = ""

    @property
    def available(self) -> bool:
        """True when this release has the option."""
        return self.since != ""


@cache
def _file() -> dict[str, Any]:
    return tomllib.loads(Path(__file__).with_name("flags.toml").read_text("utf-8"))


@cache
def flag_rows() -> tuple[Known, ...]:
    """Return the rows of the seeds' option tables, one per flag."""
    return tuple(Known(**row) for row in _file()["flags"])


@cache
def extra_rows() -> tuple[Known, ...]:
    """Return the rows of the keys that no seed has."""
    return tuple(Known(key=key, **row) for key, row in _file()["extra"].items())


@cache
def known_keys() -> Mapping[str, Known]:
    """Return the row of every recipe key, flag rows that are one word of a list left out."""
    rows = (*flag_rows(), *extra_rows())
    return {row.key: row for row in rows if "." in row.key and not row.value}


@cache
def moved_keys() -> Mapping[str, Known]:
    """Return by its former name the row of every option that stands in its plugin's table."""
    return {row.was: row for row in flag_rows() if row.was}


@cache
def core_options(section: str) -> frozenset[str]:
    """Return the names of core's own options of a section, also of those not available yet."""
    split = [(row.owner, row.key.split(".")) for row in known_keys().values()]
    return frozenset(
        parts[1]
        for owner, parts in split
        if owner == CORE and len(parts) == 2 and parts[0] == section
    )


def coming_component(section: str, name: str) -> Known | None:
    """Return a row of a component that a later release brings, or None."""
    later = [row for row in flag_rows() if not row.available and row.owner != CORE]
    start = f"{section}.{name}."
    return next((row for row in later if row.key.startswith(start)), None)


def not_available(row: Known) -> str:
    """Say that an option is known and this release does not have it."""
    return f"known option, not available in drl {RELEASE} (owner {row.owner})"


def moved_text(row: Known) -> str:
    """Say where an option stands now that has moved into its plugin's table."""
    if row.value:
        place = f'is a word in a list: write {row.key} = ["{row.value}", ...]'
    else:
        place = f"is an option of its plugin: write {row.key}"
    return place if row.available else f"{place}; {not_available(row)}"

"""Rows of a preference file: text, and the names of the chosen and of the rejected picture or video."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from drl.api import DataError

SHOWN = 20
"""How many rows at fault a message lists; the rest is counted."""

CHOSEN, REJECTED = "chosen", "rejected"


@dataclass(frozen=True, slots=True)
class Preference:
    """One row; ``number`` is its line in the file, counted from 1. The names are relative to its folder."""

    number: int
    text: str
    chosen: str
    rejected: str


class BrokenRow(ValueError):
    """Why one row cannot be used."""


def read_preferences(path: Path, *, input_key: str) -> tuple[list[Preference], dict[int, str]]:
    """Read one JSON object per line; return the rows, and why others are none, by line number.

    Raises DataError for a missing file and for one without a usable row. Opens no picture.
    """
    if path.suffix != ".jsonl" or not path.is_file():
        raise DataError(
            f"data.prompt_data: {path} is no .jsonl file; give one of rows with {input_key}, chosen, rejected"
        )
    rows: list[Preference] = []
    broken: dict[int, str] = {}
    # bytes, because str.splitlines() also splits at U+2028, which may stand inside a JSON string
    lines = path.read_bytes().removeprefix(b"\xef\xbb\xbf").split(b"\n")
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            rows.append(parse_row(number, line, input_key))
        except BrokenRow as error:
            broken[number] = str(error)
    if not rows:
        raise DataError(broken_text(path, broken) if broken else _empty_text(path, input_key))
    return rows, broken


def parse_row(number: int, line: bytes, input_key: str) -> Preference:
    """Parse one line; BrokenRow with the reason."""
    try:
        record = json.loads(line.decode("utf-8"))
    except (ValueError, RecursionError) as error:
        raise BrokenRow(f"is not JSON: {error}") from error
    if not isinstance(record, dict):
        raise BrokenRow("must be a JSON object")
    text, chosen, rejected = (_text(record, key) for key in (input_key, CHOSEN, REJECTED))
    if chosen == rejected:
        raise BrokenRow(f"chosen and rejected are both {chosen!r}")
    return Preference(number, text, chosen, rejected)


def broken_text(path: Path, broken: Mapping[int, str]) -> str:
    """Return what is wrong with which lines."""
    shown = [f"  line {number}: {why}" for number, why in list(broken.items())[:SHOWN]]
    more = [f"  … and {len(broken) - SHOWN} more"] if len(broken) > SHOWN else []
    head = f"data.prompt_data: {path} has {len(broken)} broken row{'s' if len(broken) > 1 else ''}"
    return "\n".join([head, *shown, *more])


def digest(rows: Sequence[Preference]) -> str:
    """Return 16 hex digits that change when any of the rows does."""
    content = [[row.number, row.text, row.chosen, row.rejected] for row in rows]
    return hashlib.sha256(json.dumps(content).encode()).hexdigest()[:16]


def _empty_text(path: Path, input_key: str) -> str:
    return (
        f"data.prompt_data: {path} holds no preference: it is empty; give one row "
        f'{{"{input_key}": …, "chosen": …, "rejected": …}} per line'
    )


def _text(record: Mapping[str, Any], key: str) -> str:
    value = record.get(key)
    if not isinstance(value, str) or not value.strip() or "\0" in value:
        have = ", ".join(map(repr, record)) or "nothing"
        raise BrokenRow(f"needs a text under {key!r}; it has {have}")
    return value

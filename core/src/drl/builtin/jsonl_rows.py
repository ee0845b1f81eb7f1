"""Rows of a JSON-lines prompt file, or an error that names every line at fault."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rapidfuzz import process

from drl.components import EMPTY
from drl.errors import DataError
from drl.types import MediaFile

SHOWN = 10
"""How many lines at fault a message lists; the rest is counted."""


@dataclass(frozen=True, slots=True)
class Row:
    """One usable row; ``number`` is its line number in the file, counted from 1."""

    number: int
    text: str
    metadata: Mapping[str, Any] = EMPTY


@dataclass(slots=True)
class PromptFile:
    """What a file holds: usable rows in file order, line numbers of rows without text, what is broken where."""

    rows: list[Row] = field(default_factory=list)
    empty: list[int] = field(default_factory=list)
    broken: dict[int, str] = field(default_factory=dict)


def digest(rows: Sequence[Row]) -> str:
    """Return 16 hex digits that change when any of the rows does."""
    content = [[row.number, row.text, dict(row.metadata)] for row in rows]
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:16]


class BrokenRow(ValueError):
    """Why one row cannot be used."""


def read_prompts(
    path: Path, *, input_key: str, metadata_key: str, skip_broken: bool = False
) -> PromptFile:
    """Read a file of one JSON object per line; blank lines are nothing, empty texts are noted.

    Raises DataError for another extension, a missing file, a file without a usable row and, unless
    ``skip_broken``, broken rows (all their line numbers are known, the first ten are shown).
    """
    _check_path(path)
    found = PromptFile()
    for number, line in _lines(path):
        try:
            row = parse_row(number, line, input_key=input_key, metadata_key=metadata_key)
        except BrokenRow as error:
            found.broken[number] = str(error)
            continue
        if row.text.strip():
            found.rows.append(row)
        else:
            found.empty.append(number)
    if found.broken and not (skip_broken and found.rows):
        raise DataError(broken_text(path, found.broken))
    if not found.rows:
        why = f"all {len(found.empty)} rows have an empty text" if found.empty else "it is empty"
        raise DataError(f"data.prompt_data: {path} has no prompt: {why}; give one row per prompt")
    return found


def parse_row(number: int, line: bytes, *, input_key: str, metadata_key: str) -> Row:
    """Parse one line; raises BrokenRow with the reason."""
    try:
        record = json.loads(line.decode("utf-8"))
    except UnicodeDecodeError as error:
        raise BrokenRow("is not UTF-8") from error
    except (ValueError, RecursionError) as error:
        raise BrokenRow(f"is not JSON: {error}") from error
    if not isinstance(record, dict):
        raise BrokenRow(f"must be a JSON object, is {_kind(record)}")
    if input_key not in record:
        raise BrokenRow(_missing_text(input_key, record))
    text = record[input_key]
    if not isinstance(text, str):
        raise BrokenRow(f"{input_key!r} must be a string, is {_kind(text)}")
    if not _encodable(text):
        raise BrokenRow(f"{input_key!r} holds half a surrogate pair")
    metadata = record.get(metadata_key)
    if metadata is None:
        return Row(number, text)
    if not isinstance(metadata, dict):
        raise BrokenRow(f"{metadata_key!r} must be a JSON object, is {_kind(metadata)}")
    return Row(number, text, metadata)


def media_of(metadata: Mapping[str, Any], root: Path) -> MediaFile | None:
    """Return the image or video that a row names, relative to ``root``; None unless it is exactly one."""
    named = [
        MediaFile(root=root, name=metadata[kind], kind=kind)
        for kind in ("image", "video")
        if isinstance(metadata.get(kind), str) and metadata[kind]
    ]
    return named[0] if len(named) == 1 else None


def _check_path(path: Path) -> None:
    if path.suffix != ".jsonl":
        raise DataError(
            f"data.prompt_data: {path} must end in .jsonl: one JSON object per line, "
            f"got {path.suffix or 'no extension'}"
        )
    if not path.is_file():
        state = "is not a file" if path.exists() else "does not exist"
        raise DataError(f"data.prompt_data: {path} {state}; give the path of a .jsonl file")


def _lines(path: Path) -> Iterator[tuple[int, bytes]]:
    # bytes, because str.splitlines() also splits at U+2028, which may stand inside a JSON string
    content = path.read_bytes().removeprefix(b"\xef\xbb\xbf")
    for number, line in enumerate(content.split(b"\n"), start=1):
        if line.strip():
            yield number, line


def _missing_text(input_key: str, record: Mapping[str, Any]) -> str:
    if not record:
        return f"lacks {input_key!r}: it is an empty object"
    nearest = process.extractOne(input_key, sorted(record))
    return (
        f"lacks {input_key!r}; nearest key: {nearest[0]!r} (data.input_key names the prompt's key)"
    )


def broken_text(path: Path, broken: Mapping[int, str]) -> str:
    """Return how many rows are broken, and why the first ones are."""
    count = len(broken)
    shown = list(broken.items())[:SHOWN]
    head = f"data.prompt_data: {path} has {count} broken row{'s' if count != 1 else ''}"
    rest = [f"  … and {count - SHOWN} more"] if count > SHOWN else []
    return "\n".join([head, *(f"  line {number}: {why}" for number, why in shown), *rest])


def _encodable(text: str) -> bool:
    return not any("\ud800" <= character <= "\udfff" for character in text)


def _kind(value: object) -> str:
    names = {dict: "an object", list: "a list", str: "a string", bool: "a boolean"}
    return "null" if value is None else names.get(type(value), "a number")

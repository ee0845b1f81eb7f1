"""Files that are either whole or absent: atomic replacement, and JSON lines that survive a kill.

JSON has no NaN and no infinity: ``plain`` turns both into null, so that every file here can be read
by any JSON parser.
"""

from __future__ import annotations

import dataclasses
import enum
import json
import math
import numbers
import os
import uuid
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

PARTIAL = ".partial"
"""Suffix of a file that is being written; one that lies about belongs to a killed process."""

LARGEST = 1e150
"""Figures beyond this are damage; below it sums, squares and ranges stay finite."""


def plain(value: object) -> Any:
    """Turn dataclasses, mappings, sequences, sets, paths and number-likes into JSON values.

    A float that is not finite becomes None. TypeError names a type that has no JSON form.
    """
    if value is None or isinstance(value, str | bool):
        return value.value if isinstance(value, enum.Enum) else value
    if isinstance(value, numbers.Integral):
        return int(value)
    if isinstance(value, numbers.Real):
        return float(value) if math.isfinite(value) else None
    if isinstance(value, Path):
        return str(value)
    return _plain_container(value)


def _plain_container(value: object) -> Any:
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {f.name: plain(getattr(value, f.name)) for f in dataclasses.fields(value)}
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, set | frozenset):
        return [plain(item) for item in sorted(value, key=str)]
    if isinstance(value, Sequence) and not isinstance(value, bytes | bytearray):
        return [plain(item) for item in value]
    raise TypeError(
        f"{type(value).__name__} has no JSON form; give numbers, text, lists or mappings"
    )


def write_bytes_atomic(path: Path, content: bytes) -> None:
    """Replace ``path`` in one step: after a kill or a power cut it is the old file or the new one."""
    partial = path.with_name(f".{path.name}.{uuid.uuid4().hex[:12]}{PARTIAL}")
    try:
        with partial.open("xb") as handle:
            handle.write(content)
            handle.flush()
            os.fsync(handle.fileno())
        partial.replace(path)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise
    flush_directory(path.parent)


def write_text_atomic(path: Path, text: str) -> None:
    """Replace a UTF-8 text file in one step."""
    # A lone surrogate (a prompt read with surrogateescape) must not cost the file it appears in.
    write_bytes_atomic(path, text.encode("utf-8", errors="backslashreplace"))


def write_json_atomic(path: Path, value: object) -> None:
    """Replace a JSON file in one step; two-space indent, keys in the order given."""
    write_text_atomic(path, json.dumps(plain(value), indent=2, allow_nan=False) + "\n")


def append_json_line(path: Path, value: object) -> None:
    """Add one row to a JSON-lines file; a row torn by a kill before is closed off first."""
    line = json.dumps(plain(value), allow_nan=False) + "\n"
    with path.open("ab+") as handle:
        if handle.tell() > 0:
            handle.seek(-1, os.SEEK_END)
            line = line if handle.read(1) == b"\n" else "\n" + line
        handle.write(line.encode("utf-8"))


def number(value: object) -> float | None:
    """Return a JSON value as a float, or None for what is no finite number of usable size."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    return float(value) if -LARGEST < value < LARGEST else None


def read_json_lines(path: Path) -> tuple[list[dict[str, Any]], list[str]]:
    """Return the rows of a JSON-lines file, and a remark for each line that is not a JSON object."""
    rows: list[dict[str, Any]] = []
    remarks: list[str] = []
    text = path.read_text(encoding="utf-8", errors="replace")
    for number, line in enumerate(text.split("\n"), start=1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except (ValueError, RecursionError):
            row = None
        if isinstance(row, dict):
            rows.append(row)
        else:
            remarks.append(f"{path.name} line {number} is not a whole JSON object; it was left out")
    return rows, remarks


def flush_directory(path: Path) -> None:
    """Bring a directory's entries to disk, so that a rename in it outlives a power cut."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)

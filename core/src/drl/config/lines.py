"""Find the line of each option in TOML text. Only for messages: a line may be missing, never needed."""

from __future__ import annotations

import re

_HEADER = re.compile(r"\s*(\[\[?)\s*([^\[\]]+?)\s*\]\]?\s*(?:#.*)?$")
_KEY = re.compile(
    r"""\s*((?:[A-Za-z0-9_-]+|"[^"]*"|'[^']*')(?:\s*\.\s*(?:[A-Za-z0-9_-]+|"[^"]*"|'[^']*'))*)\s*="""
)
_STRING = re.compile(r'"(?:[^"\\]|\\.)*"|\'[^\']*\'|#.*')
_FENCES = ('"""', "'''")


def line_numbers(text: str) -> dict[str, int]:
    """Return the line, from 1, of every table header and key, by dotted path."""
    lines: dict[str, int] = {}
    counts: dict[str, int] = {}
    table, depth, fence = "", 0, ""
    for number, line in enumerate(text.splitlines(), start=1):
        if fence:
            fence = "" if line.count(fence) % 2 else fence
            continue
        if depth <= 0:
            header, key = _HEADER.match(line), _KEY.match(line)
            if header:
                table = _enter(header[1], _plain(header[2]), counts)
                lines.setdefault(table, number)
                continue
            if key:
                lines.setdefault(".".join(filter(None, [table, _plain(key[1])])), number)
                depth = 0
        fence = next((mark for mark in _FENCES if line.count(mark) % 2), "")
        bare = _STRING.sub("", line)
        depth += bare.count("[") + bare.count("{") - bare.count("]") - bare.count("}")
    return lines


def _plain(key: str) -> str:
    return ".".join(part.strip().strip("\"'") for part in key.split("."))


def _enter(brackets: str, name: str, counts: dict[str, int]) -> str:
    """Return the path of a table; the entries of a list of tables are numbered."""
    if brackets == "[[":
        counts[name] = counts.get(name, -1) + 1
        return f"{name}.{counts[name]}"
    return name

#!/usr/bin/env python3
"""Write the reference part of docs/hooks.md from the hook specifications; with ``--write``, store it."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Iterator
from pathlib import Path
from types import FunctionType

from drl import hookspecs
from signatures import signature_of

PAGE = Path(__file__).resolve().parents[1] / "docs" / "hooks.md"
MARKER = "<!-- From here on written by tools/hook_reference.py. -->\n"


def reference() -> str:
    """Return every hook with its exact signature and its contract, in phase order."""
    sections = [
        f"### `{name}`\n\n```python\n{name}{signature_of(function)}\n```\n\n"
        f"{markdown(inspect.getdoc(function) or '')}\n"
        for name, function in hooks()
    ]
    return "\n".join(sections)


def hooks() -> Iterator[tuple[str, FunctionType]]:
    """Yield name and specification of every hook, in the order of the source."""
    for name, function in vars(hookspecs).items():
        if name.startswith("drl_") and inspect.isfunction(function):
            yield name, function


def markdown(docstring: str) -> str:
    """Return a docstring with single backticks."""
    return docstring.replace("``", "`")


def page() -> str:
    """Return the whole page: what was written by hand above the marker, then the reference."""
    introduction = PAGE.read_text("utf-8").partition(MARKER)[0]
    return f"{introduction}{MARKER}\n{reference()}"


def main(arguments: list[str]) -> int:
    """Print the reference, or store the page; return the exit code."""
    if arguments not in ([], ["--write"]):
        print("usage: hook_reference.py [--write]", file=sys.stderr)
        return 2
    if arguments:
        PAGE.write_text(page(), "utf-8")
    else:
        print(reference(), end="")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

"""Problems as lines of text. Errors are rendered by ``RecipeError`` itself."""

from __future__ import annotations

from collections.abc import Iterable

from drl.errors import Problem, lines_of


def warning_lines(problems: Iterable[Problem]) -> list[str]:
    """Return the lines that show warnings to a person; continuation lines are indented."""
    return [
        f"warning: {line}" if number == 0 else f"  {line}"
        for problem in problems
        for number, line in enumerate(lines_of(problem))
    ]

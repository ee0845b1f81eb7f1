"""``BlankSource``: prompts without text, for a ``rollout.function`` that finds its own data."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from drl.errors import DataError
from drl.interfaces.data import DataSource
from drl.types import Context, Prompt


class BlankSource(DataSource):
    """Prompts numbered from 1, without end and without text."""

    def __init__(self, options: None, context: Context) -> None:
        super().__init__(options, context)
        self.given = 0

    def take(self, count: int) -> list[Prompt]:
        """Return the next blank prompts; DataError for a negative count."""
        if count < 0:
            raise DataError(f"a number of prompts is not negative, got {count}")
        first = self.given + 1
        self.given += count
        return [Prompt(row=row, text="") for row in range(first, first + count)]

    def state(self) -> dict[str, Any]:
        """Return how many were given."""
        return {"given": self.given}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go on after the prompts that were given."""
        self.given = int(state["given"])

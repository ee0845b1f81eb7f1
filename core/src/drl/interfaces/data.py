"""``DataSource``: where prompts come from, and where it was when a run was saved."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from drl.errors import DataError
from drl.types import Context, Group, Prompt

BufferChoice = Callable[[list[Group], int], list[Group]]
"""Takes at most so many groups out of a list and returns them."""


class DataSource(ABC):
    """A stream of prompts. ``context.section`` is the recipe's ``[data]``."""

    def __init__(self, options: Any, context: Context) -> None:
        self.options = options
        self.context = context

    @abstractmethod
    def take(self, count: int) -> list[Prompt]:
        """Return the next ``count`` prompts, wrapping into the next epoch as often as needed."""

    def give_back(self, groups: Sequence[Group]) -> None:
        """Take groups back for later; sources without a buffer refuse."""
        raise DataError(
            f"{type(self).__name__} keeps no buffer: {len(groups)} groups cannot go back"
        )

    def use_buffer_filter(self, choose: BufferChoice) -> None:
        """Let ``choose`` pick the groups that leave the buffer; sources without a buffer refuse."""
        raise DataError(
            f"rollout.buffer_filter has no use: {type(self).__name__} keeps no buffer to choose from"
        )

    def known_prompts(self) -> Sequence[Prompt]:
        """Return the prompts of one epoch where they are known beforehand; moves nothing."""
        return ()

    def rows(self) -> int | None:
        """Return the number of rows of one epoch, or None when endless."""
        return None

    @abstractmethod
    def state(self) -> dict[str, Any]:
        """Return a JSON-able position; ``restore`` and ``take`` then continue exactly."""

    @abstractmethod
    def restore(self, state: Mapping[str, Any]) -> None:
        """Go to a position that ``state`` returned."""

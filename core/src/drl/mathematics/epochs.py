"""``EpochCursor``: which row comes next, epoch after epoch; a position that a resume goes back to."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from drl.types import Context


class EpochCursor:
    """Walks ``range(rows)`` in the order that ``order_of(epoch)`` gives, and wraps."""

    def __init__(self, rows: int, order_of: Callable[[int], Sequence[int]]) -> None:
        self.rows = rows
        self._order_of = order_of
        self._go_to(0, 0)

    def next(self) -> tuple[int, int]:
        """Return (row, epoch) and move on."""
        if self._position == self.rows:
            self._go_to(self.epoch + 1, 0)
        row = self._order[self._position]
        self._position += 1
        return row, self.epoch

    def state(self) -> dict[str, Any]:
        """Return epoch and position, as plain numbers."""
        return {"epoch": self.epoch, "position": self._position}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go to a position that ``state`` returned."""
        self._go_to(int(state["epoch"]), int(state["position"]))

    def _go_to(self, epoch: int, position: int) -> None:
        self.epoch, self._position = epoch, position
        self._order = self._order_of(epoch)


def shuffled(context: Context, purpose: str, rows: int) -> Callable[[int], Sequence[int]]:
    """Return an order of the rows per epoch: a function of run seed and epoch alone."""

    def order_of(epoch: int) -> list[int]:
        import torch

        order: list[int] = torch.randperm(
            rows, generator=context.generator(purpose, epoch)
        ).tolist()
        return order

    return order_of

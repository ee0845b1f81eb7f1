"""Where a model around the transformer lives: on the device while it is used, else on the CPU."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, TypeVar

from torch import nn

from drl.model.moving import move

Part = TypeVar("Part", bound=nn.Module)


@dataclass
class Resident(Generic[Part]):
    """A frozen model that is read at its first use, moved off the device on demand, and back at the next use.

    ``load`` returns it on the device. Moving keeps every bit.
    """

    load: Callable[[], Part]
    device: str
    module: Part | None = None
    away: bool = False

    def get(self) -> Part:
        """Return the model, on the device."""
        if self.module is None:
            self.module = self.load()
        elif self.away:
            self._move(self.module, self.device)
        self.away = False
        return self.module

    def release(self) -> None:
        """Move the model to the CPU; one that was never used stays unread."""
        if self.module is not None and not self.away:
            self._move(self.module, "cpu")
            self.away = True

    def drop(self) -> None:
        """Forget the model; the next use reads it again."""
        self.module = None
        self.away = False

    def _move(self, module: nn.Module, device: str) -> None:
        if not self.device.startswith("cpu"):
            move([*module.parameters(), *module.buffers()], device)

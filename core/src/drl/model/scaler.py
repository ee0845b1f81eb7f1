"""Dynamic loss scaling for float16: small gradients survive, overflows skip a step and halve the scale."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

import torch

from drl.model.shards import local

if TYPE_CHECKING:
    from torch import nn

INITIAL = 65536.0
GROWTH_INTERVAL = 2000
"""Good steps in a row after which the scale doubles."""


class LossScaler:
    """The rule of ``torch.amp.GradScaler``, decided by the step's own verdict on its gradients.

    That verdict is agreed between ranks and on the host already, so this needs no reduction and no wait
    of its own; and it unscales float16 gradients too, which float16 masters have. ``scale`` is a power
    of two: scaling changes no bit of a gradient that neither underflows nor overflows. Disabled, the
    scale is 1 and nothing happens.
    """

    def __init__(self, *, enabled: bool) -> None:
        self.enabled = enabled
        self.scale = INITIAL if enabled else 1.0
        self.good_steps = 0
        self.overflow_steps = 0

    @torch.no_grad()
    def unscale(self, parameters: Iterable[nn.Parameter]) -> None:
        """Divide the gradients of ``parameters`` by the scale, in place; before they are clipped."""
        if not self.enabled:
            return
        gradients = [local(p.grad) for p in parameters if p.grad is not None]
        if gradients:
            torch._foreach_mul_(gradients, 1.0 / self.scale)

    def settle(self, broken: str | None) -> str | None:
        """Take the verdict on the unscaled gradients; return why the step is to be skipped.

        ``broken`` names the first gradient that is not finite. An overflow halves the scale. At scale 1
        nothing is left to halve: there the gradients themselves are broken.
        """
        if not self.enabled:
            return broken
        if broken is None:
            self._grow()
            return None
        if self.scale <= 1.0:
            return broken
        used, self.scale = self.scale, self.scale / 2
        self.good_steps = 0
        self.overflow_steps += 1
        return f"{OVERFLOW} {used:g}: {broken}; the next step runs at {self.scale:g}"

    def _grow(self) -> None:
        self.good_steps += 1
        if self.good_steps == GROWTH_INTERVAL:
            self.scale *= 2
            self.good_steps = 0

    def metrics(self, *, overflow: bool) -> dict[str, float]:
        """Return the figures of a step: the scale of the next one, and whether this one overflowed."""
        if not self.enabled:
            return {}
        return {"train/loss_scale": self.scale, "train/overflow_steps": float(overflow)}

    def state(self) -> dict[str, float | int]:
        """Return what a checkpoint keeps; ``{}`` when disabled."""
        if not self.enabled:
            return {}
        return {
            "scale": self.scale,
            "good_steps": self.good_steps,
            "overflow_steps": self.overflow_steps,
        }

    def load(self, state: Mapping[str, float | int]) -> None:
        """Go on from a state; one without a scale, of a run in another dtype, changes nothing."""
        if not self.enabled or not state:
            return
        self.scale = float(state["scale"])
        self.good_steps = int(state["good_steps"])
        self.overflow_steps = int(state["overflow_steps"])


OVERFLOW = "overflow at loss scale"
"""Start of the reason of a step that overflowed: such a step is no bad step."""

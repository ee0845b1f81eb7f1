"""The noise of samples, by the rule of the sglang server for one output per call.

One generator per sample: it draws the initial latents first, then one full-shape noise for each
stochastic step; deterministic steps draw nothing. With a path seed a second generator draws the step
noise; it too draws initial latents first and drops them, so that a path seed equal to the seed gives
the very sample that no path seed gives.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from drl.api import Pipeline, Sampling
from drl.mathematics.transfer import moved
from drl_engine_local.transfer import pinned_empty

if TYPE_CHECKING:
    from torch import Generator, Tensor


class RowNoise:
    """Draws of one sample, in the order of its steps; ``initial``: ``(*L)`` on the generator's device."""

    def __init__(
        self,
        pipeline: Pipeline,
        sampling: Sampling,
        *,
        seed: int,
        path_seed: int | None,
        stream: str,
        device: str,
    ) -> None:
        home = "cpu" if sampling.generator_device == "cpu" else device
        self.generator: Generator = torch.Generator(home).manual_seed(seed)
        self.initial: Tensor = pipeline.initial(sampling, self.generator)[stream]
        if path_seed is not None:
            self.generator = torch.Generator(home).manual_seed(path_seed)
            pipeline.initial(sampling, self.generator)

    def draw(self, into: Tensor) -> None:
        """Write the noise of the next stochastic step, standard normal, ``(*L)`` float32."""
        into.normal_(generator=self.generator)


class BatchNoise:
    """The draws of a batch of ``count`` rows on the device; the last row fills the batch up."""

    def __init__(self, rows: Sequence[RowNoise], count: int, device: torch.device) -> None:
        self._rows = rows
        self._filler = count - len(rows)
        self._device = device
        self._home = rows[0].initial.device
        self._shape = (count, *rows[0].initial.shape)

    def initial(self) -> Tensor:
        """Return the initial latents, ``(R, *L)`` float32."""
        drawn = [row.initial for row in self._rows]
        return moved(torch.stack([*drawn, *[drawn[-1]] * self._filler]), self._device)

    def draw(self, stochastic: Sequence[bool]) -> Tensor:
        """Return ``(R, *L)`` float32: noise in stochastic rows; elsewhere 0, and no generator moves."""
        noise = pinned_empty(self._shape, self._home, self._device)
        for place, row in enumerate(self._rows):
            if stochastic[place]:
                row.draw(noise[place])
            else:
                noise[place].zero_()
        if self._filler:
            last = len(self._rows)
            noise[last:] = noise[last - 1]
        # pinned above: the copy waits for nothing
        return noise.to(self._device, non_blocking=True)

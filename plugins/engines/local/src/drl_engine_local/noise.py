"""The noise of one sample, by the rule of the sglang server for one output per call.

One generator per sample: it draws the initial latents first, then one full-shape noise for each
stochastic step; deterministic steps draw nothing. With a path seed a second generator draws the step
noise; it too draws initial latents first and drops them, so that a path seed equal to the seed gives
the very sample that no path seed gives.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from drl.api import Pipeline, Sampling

if TYPE_CHECKING:
    from torch import Generator, Tensor


class RowNoise:
    """Draws of one sample, in the order of its steps."""

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
        self.device = device
        self.generator: Generator = torch.Generator(home).manual_seed(seed)
        self.initial: Tensor = pipeline.initial(sampling, self.generator)[stream].to(device)
        if path_seed is not None:
            self.generator = torch.Generator(home).manual_seed(path_seed)
            pipeline.initial(sampling, self.generator)

    def draw(self) -> Tensor:
        """Return the noise of the next stochastic step, ``(*L)`` float32 standard normal."""
        shape = (1, *self.initial.shape)
        noise = torch.randn(shape, generator=self.generator, device=self.generator.device)
        return noise[0].to(self.device)

"""The forward process of flow matching on a batch of pairs: noise by pair, latents between data and noise."""

from __future__ import annotations

import torch
from torch import Tensor

from drl.api import PairBatch, StepContext, Streams
from drl.mathematics.gaussian import over_rows


def pair_noise(pairs: PairBatch, context: StepContext, purpose: str) -> Streams:
    """Draw standard normal noise on the CPU, pair by pair, whatever device the training runs on.

    A function of run seed, purpose and pair id, so it depends neither on the batch nor on the rank.
    """
    rows: dict[str, list[Tensor]] = {stream: [] for stream in pairs.tensors}
    for pair in pairs.pairs:
        generator = context.generator(purpose, *pair.id)
        for stream, noise in rows.items():
            noise.append(torch.randn(pair.tensors[stream].shape, generator=generator))
    return {
        stream: torch.stack(noise).to(pairs.tensors[stream].device)
        for stream, noise in rows.items()
    }


def noised(clean: Tensor, noise: Tensor, sigma_B: Tensor) -> Tensor:
    """Return ``(1 - sigma) x0 + sigma noise``, ``(B, *L)``."""
    sigma = over_rows(sigma_B, clean)
    return (1 - sigma) * clean + sigma * noise

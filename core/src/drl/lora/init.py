"""Start values of A and B (lora.md 2.3).

A scheme takes rank, input size, output size and a CPU generator and returns A [rank, in] and
B [out, rank], both float32 on the CPU. Schemes registered here must leave the base weight as it is.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch

InitScheme = Callable[[int, int, int, torch.Generator], tuple[torch.Tensor, torch.Tensor]]


def gaussian(
    rank: int, in_features: int, out_features: int, generator: torch.Generator
) -> tuple[torch.Tensor, torch.Tensor]:
    """A ~ N(0, standard deviation 1/rank), B = 0."""
    A = torch.randn(rank, in_features, generator=generator) / rank
    return A, torch.zeros(out_features, rank)


def kaiming_uniform(
    rank: int, in_features: int, out_features: int, generator: torch.Generator
) -> tuple[torch.Tensor, torch.Tensor]:
    """A ~ U(-1/sqrt(in), 1/sqrt(in)), B = 0: kaiming_uniform with a = sqrt(5), PEFT's default."""
    bound = 1 / math.sqrt(in_features)
    A = torch.empty(rank, in_features).uniform_(-bound, bound, generator=generator)
    return A, torch.zeros(out_features, rank)


INIT_SCHEMES: dict[str, InitScheme] = {
    "gaussian": gaussian,
    "kaiming-uniform": kaiming_uniform,
}

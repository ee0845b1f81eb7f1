"""Start values of A and B (lora.md 2.3).

Most schemes take rank, input size, output size and a CPU generator, return A [rank, in] and
B [out, rank], both float32 on the CPU, and know nothing of the base weight. ``pissa`` and ``olora``
take them from the base weight W; so that the model does not change at the start, the layer subtracts
``scale * B0 A0`` of these start values from its output. PEFT subtracts it from W, which rounds W and
makes the base model unreachable; here W stays as it is.

``kaiming-uniform`` and ``random`` are what PEFT calls ``true`` and ``false``. Embeddings start with
A = 0 and B ~ N(0, 1) under every scheme but ``random``, as in PEFT.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch

Factors = tuple[torch.Tensor, torch.Tensor]
InitScheme = Callable[[int, int, int, torch.Generator], Factors]
BaseScheme = Callable[[torch.Tensor, int, float], Factors]


def gaussian(rank: int, in_features: int, out_features: int, generator: torch.Generator) -> Factors:
    """A ~ N(0, standard deviation 1/rank), B = 0."""
    A = torch.randn(rank, in_features, generator=generator) / rank
    return A, torch.zeros(out_features, rank)


def kaiming_uniform(
    rank: int, in_features: int, out_features: int, generator: torch.Generator
) -> Factors:
    """A ~ U(-1/sqrt(in), 1/sqrt(in)), B = 0: kaiming_uniform with a = sqrt(5), PEFT's default."""
    return _uniform(rank, in_features, generator), torch.zeros(out_features, rank)


def random(rank: int, in_features: int, out_features: int, generator: torch.Generator) -> Factors:
    """A and B as ``nn.Linear`` starts its weight; the adapter changes the model from the start."""
    A = _uniform(rank, in_features, generator)
    return A, _uniform(out_features, rank, generator)


def orthogonal(
    rank: int, in_features: int, out_features: int, generator: torch.Generator
) -> Factors:
    """A and B random, in orthogonal halves of an even rank, so that B A = 0."""
    Q, _ = torch.linalg.qr(torch.randn(rank, rank, generator=generator))
    A = torch.randn(in_features, rank // 2, generator=generator) @ Q[0::2]
    B = torch.randn(out_features, rank // 2, generator=generator) @ Q[1::2]
    return (A / 10).T.contiguous(), B / 10


def pissa(W: torch.Tensor, rank: int, scale: float) -> Factors:
    """The largest ``rank`` singular directions of W [out, in], split evenly between A and B."""
    U, S, Vh = torch.linalg.svd(W.float(), full_matrices=False)
    root = (S[:rank] / scale).sqrt()
    return root[:, None] * Vh[:rank], U[:, :rank] * root


def olora(W: torch.Tensor, rank: int, scale: float) -> Factors:
    """The first ``rank`` columns of Q and rows of R of W [out, in]; ``scale`` is not divided out."""
    Q, R = torch.linalg.qr(W.float())
    return R[:rank].contiguous(), Q[:, :rank].contiguous()


INIT_SCHEMES: dict[str, InitScheme] = {
    "gaussian": gaussian,
    "kaiming-uniform": kaiming_uniform,
    "random": random,
    "orthogonal": orthogonal,
}
BASE_SCHEMES: dict[str, BaseScheme] = {"pissa": pissa, "olora": olora}


def embedding_start(
    init: str, rank: int, rows: int, features: int, generator: torch.Generator
) -> Factors:
    """Return A [rank, rows] and B [features, rank] of an adapted embedding."""
    B = torch.randn(features, rank, generator=generator)
    if init == "random":
        return torch.randn(rank, rows, generator=generator), B
    return torch.zeros(rank, rows), B


def _uniform(rows: int, columns: int, generator: torch.Generator) -> torch.Tensor:
    bound = 1 / math.sqrt(columns)
    return torch.empty(rows, columns).uniform_(-bound, bound, generator=generator)

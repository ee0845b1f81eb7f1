"""Digests of named tensors: one that proves equality, one that tells quickly whether anything changed."""

from __future__ import annotations

from collections.abc import Iterable
from hashlib import sha256

import torch
from torch import Tensor


def tensors_digest(names: Iterable[str], tensors: Iterable[Tensor]) -> str:
    """Return the SHA-256 (hex) over sorted (name, dtype, shape, raw bytes).

    Any dtype, any device; the order of the arguments does not matter. Contiguous CPU tensors are
    read in place. Raises ValueError when names repeat or the two lengths differ.
    """
    digest = sha256()
    previous = None
    for name, tensor in sorted(zip(names, tensors, strict=True), key=lambda item: item[0]):
        if name == previous:
            raise ValueError(f"tensor name {name!r} occurs twice; a digest needs unique names")
        previous = name
        dtype = str(tensor.dtype).removeprefix("torch.")
        digest.update(repr((name, dtype, tuple(tensor.shape))).encode())
        digest.update(raw_bytes(tensor))
    return digest.hexdigest()


def raw_bytes(tensor: Tensor) -> memoryview:
    """Return the bytes of a tensor in row-major order, without a copy where it lies so on the CPU."""
    flat = tensor.detach().cpu().contiguous().reshape(-1)
    return flat.view(torch.uint8).numpy().data


INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
COLUMNS = 4096


def tensors_fingerprint(names: Iterable[str], tensors: Iterable[Tensor]) -> str:
    """Return a hex digest that changes when a bit of a tensor does, computed where the tensors lie.

    Sums of the bit patterns, plain and weighted by place, in wrapping 64-bit integers: the same on
    every device, and at the speed of its memory. Unlike ``tensors_digest`` it can be fooled on purpose.
    """
    items = sorted(zip(names, tensors, strict=True), key=lambda item: item[0])
    if not items:
        return sha256().hexdigest()
    # one transfer for all of them
    device = items[0][1].device
    sums = torch.stack([bit_sums(tensor).to(device) for _, tensor in items]).tolist()
    facts = [
        (name, str(tensor.dtype), tuple(tensor.shape), *values)
        for (name, tensor), values in zip(items, sums, strict=True)
    ]
    return sha256(repr(facts).encode()).hexdigest()


def bit_sums(tensor: Tensor) -> Tensor:
    """Return ``(3,)`` int64: the sum of the bit patterns, weighted by nothing, by row, by column."""
    bits = tensor.detach().contiguous().reshape(-1).view(INTEGERS[tensor.element_size()])
    whole = bits.numel() // COLUMNS * COLUMNS
    body, rest = bits[:whole].view(-1, COLUMNS), bits[whole:]
    rows, columns = body.sum(1, dtype=torch.int64), body.sum(0, dtype=torch.int64)
    columns[: rest.numel()] += rest * 3
    return torch.stack([columns.sum(), _weighted(rows), _weighted(columns)])


def _weighted(sums: Tensor) -> Tensor:
    # an odd multiplier: no place is weighted by 0, and places far apart differ
    weights = torch.arange(1, sums.numel() + 1, device=sums.device) * 2654435761 + 1
    return (sums * weights).sum()

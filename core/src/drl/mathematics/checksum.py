"""A digest of named tensors that trainer and engine can both compute."""

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

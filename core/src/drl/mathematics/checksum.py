"""Digests of named tensors: one that proves equality, one that tells quickly whether anything changed."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from hashlib import sha256
from itertools import pairwise

import torch
from torch import Tensor

PIECE_BYTES = 2**26
"""Most bytes that are gathered into one piece; a digest reads a tensor that is larger as one."""


FEW_BYTES = 2**20
"""Fewer bytes are hashed without threads."""

HASHERS = 8
"""Most threads of one digest."""


def tensors_digest(names: Iterable[str], tensors: Iterable[Tensor]) -> str:
    """Return the SHA-256 (hex) over sorted (name, dtype, shape, SHA-256 of the raw bytes).

    Any dtype, any device; the order of the arguments does not matter. Contiguous CPU tensors are
    read in place, those of a GPU fetched many at a time; several are hashed at once. Raises ValueError when
    names repeat or the two lengths differ.
    """
    items = sorted(zip(names, tensors, strict=True), key=lambda item: item[0])
    for (name, _), (following, _) in pairwise(items):
        if name == following:
            raise ValueError(f"tensor name {name!r} occurs twice; a digest needs unique names")
    digest = sha256()
    contents = content_digests([tensor for _, tensor in items])
    for (name, tensor), content in zip(items, contents, strict=True):
        dtype = str(tensor.dtype).removeprefix("torch.")
        digest.update(repr((name, dtype, tuple(tensor.shape))).encode())
        digest.update(content)
    return digest.hexdigest()


def content_digests(tensors: Sequence[Tensor]) -> Iterator[bytes]:
    """Yield the SHA-256 of the bytes of each tensor in row-major order.

    Threads hash one piece while the next is fetched: two pieces are on the host at most.
    """
    if sum(tensor.nbytes for tensor in tensors) < FEW_BYTES:
        yield from (sha256(view).digest() for piece in host_bytes(tensors) for view in piece)
        return
    with ThreadPoolExecutor(min(os.cpu_count() or 1, HASHERS)) as pool:
        pending: list[Future[bytes]] = []
        for piece in host_bytes(tensors):
            hashing = [pool.submit(_hashed, view) for view in piece]
            yield from (done.result() for done in pending)
            pending = hashing
            del piece, hashing  # the memory of a piece goes with it
        yield from (done.result() for done in pending)


def _hashed(view: memoryview) -> bytes:
    return sha256(view).digest()


def host_bytes(tensors: Sequence[Tensor]) -> Iterator[list[memoryview]]:
    """Yield the bytes of neighbouring tensors in row-major order, those of a GPU copied in one transfer."""
    for piece in pieces(tensors):
        if not piece[0].is_cuda:
            yield [raw_bytes(tensor) for tensor in piece]
            continue
        flat = torch.cat([tensor.detach().reshape(-1).view(torch.uint8) for tensor in piece])
        host = torch.empty(flat.shape, dtype=torch.uint8, pin_memory=True)
        host.copy_(flat)
        yield [part.numpy().data for part in host.split([tensor.nbytes for tensor in piece])]


def pieces(tensors: Iterable[Tensor]) -> Iterator[list[Tensor]]:
    """Yield neighbours of one device and element size, up to ``PIECE_BYTES`` together."""
    piece: list[Tensor] = []
    size = 0
    for tensor in tensors:
        alike = piece and (tensor.device, tensor.element_size()) == (
            piece[0].device,
            piece[0].element_size(),
        )
        if piece and (not alike or size + tensor.nbytes > PIECE_BYTES):
            yield piece
            piece, size = [], 0
        piece.append(tensor)
        size += tensor.nbytes
    if piece:
        yield piece


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
    facts = [(name, str(tensor.dtype), tuple(tensor.shape)) for name, tensor in items]
    # large models are hundreds of small tensors: a few kernels for many of them, one transfer for all
    alike = sorted((tensor for _, tensor in items), key=Tensor.element_size)
    device = items[0][1].device
    parts = (part for tensor in alike for part in slices(tensor))
    sums = torch.stack([bit_sums(piece).to(device) for piece in pieces(parts)]).tolist()
    return sha256(repr((facts, sums)).encode()).hexdigest()


def slices(tensor: Tensor) -> tuple[Tensor, ...]:
    """Return the elements of a tensor in parts of at most ``PIECE_BYTES``: a sum takes 64 bits for each."""
    return torch.split(tensor.detach().reshape(-1), PIECE_BYTES // tensor.element_size())


def bit_sums(tensors: Sequence[Tensor]) -> Tensor:
    """Return ``(3,)`` int64: the sum of the bit patterns, weighted by nothing, by row, by column.

    Of several tensors as of one that has their elements one after the other; all of one element size.
    """
    kind = INTEGERS[tensors[0].element_size()]
    flat = [tensor.detach().reshape(-1).view(kind) for tensor in tensors]
    bits = flat[0] if len(flat) == 1 else torch.cat(flat)
    whole = bits.numel() // COLUMNS * COLUMNS
    body, rest = bits[:whole].view(-1, COLUMNS), bits[whole:]
    rows, columns = body.sum(1, dtype=torch.int64), body.sum(0, dtype=torch.int64)
    columns[: rest.numel()] += rest * 3
    return torch.stack([columns.sum(), _weighted(rows), _weighted(columns)])


def _weighted(sums: Tensor) -> Tensor:
    # an odd multiplier: no place is weighted by 0, and places far apart differ
    weights = torch.arange(1, sums.numel() + 1, device=sums.device) * 2654435761 + 1
    return (sums * weights).sum()

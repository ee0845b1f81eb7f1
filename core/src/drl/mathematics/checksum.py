"""Digests of named tensors: one that proves equality, one that tells quickly whether anything changed."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import cache
from hashlib import sha256
from itertools import pairwise

import torch
from torch import Tensor

from drl.mathematics.packing import neighbours

DIGEST_BYTES = 2**25
"""Bytes that are fetched together for a digest, a larger tensor whole: one piece is hashed while the next comes."""

FINGERPRINT_BYTES = 2**27
"""Most bytes that are summed together: fewer are more kernels than the host launches in their time."""

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
        pending: list[Future[list[bytes]]] = []
        for piece in host_bytes(tensors):
            # a call for each tensor would cost more than its hash
            share = sum(view.nbytes for view in piece) / HASHERS
            parts = neighbours(piece, lambda view: view.nbytes, share)
            hashing = [pool.submit(_hashed, part) for part in parts]
            for done in pending:
                yield from done.result()
            pending = hashing
            del piece, parts, hashing  # the memory of a piece goes with it
        for done in pending:
            yield from done.result()


def _hashed(views: Sequence[memoryview]) -> list[bytes]:
    return [sha256(view).digest() for view in views]


def host_bytes(tensors: Sequence[Tensor]) -> Iterator[list[memoryview]]:
    """Yield the bytes of neighbouring tensors in row-major order, those of a GPU copied in one transfer."""
    for piece in pieces(tensors, DIGEST_BYTES):
        if not piece[0].is_cuda:
            yield [raw_bytes(tensor) for tensor in piece]
            continue
        flat = torch.cat([bytes_of(tensor) for tensor in piece])
        host = torch.empty(flat.shape, dtype=torch.uint8, pin_memory=True)
        host.copy_(flat)
        yield [part.numpy().data for part in host.split([tensor.nbytes for tensor in piece])]


def pieces(tensors: Iterable[Tensor], most: int) -> Iterator[list[Tensor]]:
    """Yield neighbours of one device and element size, up to so many bytes together."""
    return neighbours(
        tensors, lambda one: one.nbytes, most, lambda one: (one.device, one.element_size())
    )


def raw_bytes(tensor: Tensor) -> memoryview:
    """Return the bytes of a tensor in row-major order, without a copy where it lies so on the CPU."""
    return bytes_of(tensor.cpu()).numpy().data


def bytes_of(tensor: Tensor) -> Tensor:
    """Return the bytes of a tensor in row-major order, 1-D: a view where it lies so."""
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8)


INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
WORD = 8
"""Bytes of what is summed: numbers of fewer would be widened first, to a copy of as many times the size."""
COLUMNS = 4096


def tensors_fingerprint(names: Iterable[str], tensors: Iterable[Tensor]) -> str:
    """Return a hex digest that changes when a bit of a tensor does, computed where the tensors lie.

    Sums of the bits as wrapping 64-bit integers, plain and weighted by place: the same on every device, and
    at the speed of its memory. Unlike ``tensors_digest`` it can be fooled on purpose.
    """
    items = sorted(zip(names, tensors, strict=True), key=lambda item: item[0])
    if not items:
        return sha256().hexdigest()
    facts = [(name, str(tensor.dtype), tuple(tensor.shape)) for name, tensor in items]
    # large models are hundreds of small tensors: a few kernels for many of them, one transfer for all
    alike = sorted((tensor for _, tensor in items), key=Tensor.element_size)
    some = pieces((part for tensor in alike for part in slices(tensor)), FINGERPRINT_BYTES)
    device = items[0][1].device
    sums = [one.to(device) for piece in some for one in bit_sums(piece)]
    return sha256(repr((facts, torch.stack(sums).tolist())).encode()).hexdigest()


def slices(tensor: Tensor) -> tuple[Tensor, ...]:
    """Return the elements of a tensor in parts of at most ``FINGERPRINT_BYTES``."""
    flat = tensor.detach().reshape(-1)
    most = FINGERPRINT_BYTES // tensor.element_size()
    return torch.split(flat, most) if flat.numel() > most else (flat,)


def bit_sums(flat: Sequence[Tensor]) -> tuple[Tensor, Tensor, Tensor]:
    """Return sums of words and three times their upper halves, int64: weighted by nothing, by row, by column.

    Of several 1-D tensors as of one that has their elements one after the other, then zeros up to a whole
    word; all of one element size.
    """
    bits = words(flat)
    # in a product the upper bits of a word lose their place: two signs that change would look like none
    mixed = bits >> 32
    torch.add(bits, mixed, alpha=3, out=mixed)
    whole = mixed.numel() // COLUMNS * COLUMNS
    body, rest = mixed[:whole].view(-1, COLUMNS), mixed[whole:]
    rows, columns = body.sum(1), body.sum(0)
    if rest.numel():
        columns[: rest.numel()] += rest * 3
    return columns.sum(), _weighted(rows), _weighted(columns)


def words(flat: Sequence[Tensor]) -> Tensor:
    """Return the bytes of 1-D tensors as int64: a view of the only one where it allows, or a copy."""
    size = flat[0].element_size()
    kind = INTEGERS[size]
    short = -sum(tensor.numel() for tensor in flat) % (WORD // size)
    aligned = flat[0].is_contiguous() and flat[0].storage_offset() * size % WORD == 0
    if len(flat) == 1 and not short and aligned:
        return flat[0].view(torch.int64)
    zeros = torch.zeros(short, dtype=kind, device=flat[0].device)
    return torch.cat([*(tensor.view(kind) for tensor in flat), zeros]).view(torch.int64)


def _weighted(sums: Tensor) -> Tensor:
    return (sums * place_weights(sums.device)[: sums.numel()]).sum()


@cache
def place_weights(device: torch.device) -> Tensor:
    """Return a weight for each row or column of a piece: 64 bits that follow no rule, the same everywhere.

    Of weights that grow evenly two changes could cancel two others.
    """
    count = max(COLUMNS, FINGERPRINT_BYTES // WORD // COLUMNS)
    drawn = b"".join(sha256(str(place).encode()).digest()[:WORD] for place in range(count))
    return torch.frombuffer(bytearray(drawn), dtype=torch.int64).to(device)

"""Filling buckets with whole units (rl-post-training reference 7.4)."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import TypeVar

Unit = TypeVar("Unit")


def pack_by_size(
    units: Iterable[Unit], size_of: Callable[[Unit], int], limit: int
) -> Iterator[list[Unit]]:
    """Yield buckets of whole units, in order; lazily, so that units can be made on the way.

    A bucket is sent as soon as the next unit would reach or exceed ``limit``; a unit of ``limit`` or
    more travels alone. Units of size 0 are skipped.
    """
    bucket: list[Unit] = []
    filled = 0
    for unit in units:
        size = size_of(unit)
        if size == 0:
            continue
        if bucket and filled + size >= limit:
            yield bucket
            bucket, filled = [], 0
        bucket.append(unit)
        filled += size
    if bucket:
        yield bucket

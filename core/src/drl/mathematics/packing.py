"""Filling buckets with whole units (rl-post-training reference 7.4), and putting alike neighbours together."""

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


def neighbours(
    items: Iterable[Unit],
    size_of: Callable[[Unit], int],
    most: float,
    kind_of: Callable[[Unit], object] | None = None,
) -> Iterator[list[Unit]]:
    """Yield neighbours of one kind together, of size ``most`` at most; a larger item alone. None is left out."""
    together: list[Unit] = []
    size, kind = 0, None
    for item in items:
        its_kind = None if kind_of is None else kind_of(item)
        if together and (its_kind != kind or size + size_of(item) > most):
            yield together
            together, size = [], 0
        kind = its_kind
        together.append(item)
        size += size_of(item)
    if together:
        yield together

"""How much memory a GPU's caching allocator reserves to hand out what a computation asks for.

What tensors take is not what they keep from others: memory comes from the driver in segments, and is handed
out of those by the best fit. The sizes are those of PyTorch's allocator for CUDA (``CUDACachingAllocator``,
2.11, as it comes: no expandable segments, nothing split or rounded by ``PYTORCH_CUDA_ALLOC_CONF``).
"""

from __future__ import annotations

from dataclasses import dataclass

KIB, MIB = 2**10, 2**20

SMALL = MIB
"""Blocks of at most this size come from small segments, and from no others."""
SMALL_SEGMENT = 2 * MIB
LARGE_SEGMENT = 20 * MIB
OWN_SEGMENT = 10 * MIB
"""Blocks of at least this size that fit nowhere get a segment of their own, rounded up to 2 MiB."""
ROUNDING = 2 * MIB
SPLIT_SMALL, SPLIT_LARGE = KIB // 2, MIB
"""What is left of a block is a block by itself from this size on (large ones: above it)."""


@dataclass(slots=True)
class Block:
    """Bytes from ``start`` to ``end`` of a segment."""

    segment: int
    start: int
    end: int
    small: bool

    @property
    def size(self) -> int:
        """Bytes of this block."""
        return self.end - self.start


class Segments:
    """Hands out blocks as the allocator does for one stream. ``reserved``: bytes of all segments so far."""

    def __init__(self) -> None:
        self.reserved = 0
        self._segments = 0
        self._free: list[Block] = []

    def take(self, size: int) -> Block:
        """Return a block for so many bytes, a multiple of 512."""
        small = size <= SMALL
        fitting = [one for one in self._free if one.small == small and one.size >= size]
        if fitting:
            block = min(fitting, key=lambda one: (one.size, one.segment, one.start))
            self._free.remove(block)
        else:
            block = self._segment(size, small)
        left = block.size - size
        if left >= SPLIT_SMALL if small else left > SPLIT_LARGE:
            self._free.append(Block(block.segment, block.start + size, block.end, small))
            block.end = block.start + size
        return block

    def _segment(self, size: int, small: bool) -> Block:
        whole = SMALL_SEGMENT if small else LARGE_SEGMENT
        if size >= OWN_SEGMENT:
            whole = -(-size // ROUNDING) * ROUNDING
        self._segments += 1
        self.reserved += whole
        return Block(self._segments, 0, whole, small)

    def give_back(self, block: Block) -> None:
        """Make a block free, together with free neighbours."""
        beside = [one for one in self._free if one.segment == block.segment]
        for one in beside:
            if one.end == block.start or one.start == block.end:
                self._free.remove(one)
                block.start, block.end = min(one.start, block.start), max(one.end, block.end)
        self._free.append(block)

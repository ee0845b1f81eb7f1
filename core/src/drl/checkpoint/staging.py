"""Copies of a training state, taken while training waits, written while it goes on.

On a GPU with room the copy stays there: it takes milliseconds, and the writer fetches it piece by piece.
Without room it goes into pinned host buffers. Allocating those takes about a second per GB and stalls the
GPU meanwhile, so they are made in small pieces with pauses, ahead of the first save, and kept.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch

from drl.checkpoint.shards import Shard

RESERVE = 2 * 2**30
"""Bytes of a GPU that stay free beside a copy: what others on it may ask for in the meantime."""

PAUSE = 4.0
"""Pause after each pinned buffer, as a multiple of the time that it took."""

Shards = Mapping[str, Shard]


@dataclass(frozen=True, slots=True, kw_only=True)
class Staged:
    """Copied shards by folder and name. ``ready``: when a copy on a GPU is complete."""

    shards: dict[str, Shards]
    ready: torch.cuda.Event | None = None

    def complete(self) -> dict[str, Shards]:
        """Return the shards once they are complete; taking a folder out of it frees its memory."""
        if self.ready is not None:
            self.ready.synchronize()
        return self.shards


class Staging:
    """Where the copies of one rank go; holds pinned buffers between saves."""

    def __init__(self) -> None:
        self._pinned: dict[tuple[str, str], torch.Tensor] = {}
        self._making: threading.Thread | None = None
        self._hurry = threading.Event()

    def copy(self, state: Mapping[str, Shards]) -> Staged:
        """Copy every shard; when this returns, training may change the originals.

        One copy at a time: the one before must have been written.
        """
        device = device_of(state)
        if device is None:
            return Staged(shards=changed(state, clone))
        if has_room(state, device):
            try:
                copies = changed(state, clone)
            except torch.cuda.OutOfMemoryError:
                pass  # it is free, but in pieces
            else:
                ready = torch.cuda.Event()
                ready.record(torch.cuda.current_stream(device))
                return Staged(shards=copies, ready=ready)
        return self._to_pinned(state, device)

    def prepare(self, state: Mapping[str, Shards]) -> None:
        """Make pinned buffers in the background when the GPU will have no room for a copy; once."""
        device = device_of(state)
        if device is None or self._making is not None or has_room(state, device):
            return
        likes = {
            (folder, name): shard.map(on_meta).local
            for folder, shards in state.items()
            for name, shard in shards.items()
        }
        self._making = threading.Thread(
            target=self._make, args=(likes,), name="drl-pin", daemon=True
        )
        self._making.start()

    def _make(self, likes: Mapping[tuple[str, str], torch.Tensor]) -> None:
        for key, like in likes.items():
            began = time.perf_counter()
            self._buffer(key, like)
            self._hurry.wait(PAUSE * (time.perf_counter() - began))

    def _buffer(self, key: tuple[str, str], like: torch.Tensor) -> torch.Tensor:
        held = self._pinned.get(key)
        if held is None or held.shape != like.shape or held.dtype != like.dtype:
            held = torch.empty(like.shape, dtype=like.dtype, pin_memory=True)
            self._pinned[key] = held
        return held

    def _to_pinned(self, state: Mapping[str, Shards], device: torch.device) -> Staged:
        if self._making is not None:
            self._hurry.set()
            self._making.join()
        copies: dict[str, Shards] = {}
        for folder, shards in state.items():
            filled = {}
            for name, shard in shards.items():
                buffer = self._buffer((folder, name), shard.local)
                buffer.copy_(shard.local, non_blocking=True)
                filled[name] = shard.map(buffer.view_as)
            copies[folder] = filled
        torch.cuda.current_stream(device).synchronize()
        return Staged(shards=copies)


def changed(
    state: Mapping[str, Shards], change: Callable[[torch.Tensor], torch.Tensor]
) -> dict[str, Shards]:
    """Return the same shards with other memory."""
    return {
        folder: {name: shard.map(change) for name, shard in shards.items()}
        for folder, shards in state.items()
    }


def clone(tensor: torch.Tensor) -> torch.Tensor:
    """Return a contiguous copy on the same device."""
    return tensor.clone(memory_format=torch.contiguous_format)


def on_meta(tensor: torch.Tensor) -> torch.Tensor:
    """Return shape and dtype alone."""
    return torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")


def size_of(state: Mapping[str, Shards]) -> int:
    """Return the bytes of all shards."""
    return sum(shard.local.nbytes for shards in state.values() for shard in shards.values())


def device_of(state: Mapping[str, Shards]) -> torch.device | None:
    """Return the GPU that shards are on, None when all are on the CPU."""
    for shards in state.values():
        for shard in shards.values():
            if shard.local.is_cuda:
                return shard.local.device
    return None


def has_room(state: Mapping[str, Shards], device: torch.device) -> bool:
    """True when a copy fits into memory that nobody holds, with a reserve."""
    free, _ = torch.cuda.mem_get_info(device)
    return free > size_of(state) + RESERVE

"""From a GPU to the CPU without waiting: copies through pinned memory, in the order of the device's work."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from torch import Tensor


def pinned_empty(shape: tuple[int, ...], home: torch.device, device: torch.device) -> Tensor:
    """Return float32 memory on ``home``; pinned where its content will go from the CPU to a GPU."""
    pinned = home.type == "cpu" and device.type == "cuda"
    return torch.empty(shape, device=home, pin_memory=pinned)


class Download:
    """Tensors of one device on their way to the CPU, behind the work that is queued there now.

    Those that are on the CPU already are handed through.
    """

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        self._tensors = {name: _started(tensor) for name, tensor in tensors.items()}
        self._event: torch.cuda.Event | None = None
        devices = {tensor.device for tensor in tensors.values() if tensor.is_cuda}
        if devices:
            # blocking: who waits sleeps, and leaves its core to the thread that launches kernels
            self._event = torch.cuda.Event(blocking=True)
            self._event.record(torch.cuda.current_stream(devices.pop()))

    @property
    def done(self) -> bool:
        """Say whether everything has arrived; never waits."""
        return self._event is None or self._event.query()

    def wait(self) -> dict[str, Tensor]:
        """Wait, and return the tensors in ordinary memory; raises what went wrong on the device."""
        if self._event is None:
            return self._tensors
        self._event.synchronize()
        # pinned memory is scarce and never given back: it serves the next batch
        return {
            name: tensor.clone() if tensor.is_pinned() else tensor
            for name, tensor in self._tensors.items()
        }


def _started(tensor: Tensor) -> Tensor:
    if not tensor.is_cuda:
        return tensor
    host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    return host.copy_(tensor, non_blocking=True)

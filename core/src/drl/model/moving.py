"""Moving tensors to another memory in place: their objects stay, and so does what they share."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor


@torch.no_grad()
def move(tensors: Iterable[Tensor], device: torch.device | str) -> None:
    """Give plain tensors new storage on ``device``, in place, bit for bit; all of them or none.

    Tensors of one storage (tied weights, views) still have one afterwards. From a GPU to the CPU they go
    into pinned memory. When this returns, the memory that they had is no longer theirs; when there is no
    room (torch's OutOfMemoryError), none has moved.
    """
    target = torch.device(device)
    moved: dict[int, Tensor] = {}
    every = list(tensors)
    for tensor in every:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in moved:
            held = torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(storage)
            pinned = tensor.is_cuda and target.type == "cpu"
            there = torch.empty(held.shape, dtype=torch.uint8, device=target, pin_memory=pinned)
            moved[storage.data_ptr()] = there.copy_(held, non_blocking=True)
    for device_of in {tensor.device for tensor in every} | {target}:
        if device_of.type == "cuda":
            torch.cuda.synchronize(device_of)
    views = []
    for tensor in every:
        there = moved[tensor.untyped_storage().data_ptr()]
        view = torch.empty(0, dtype=tensor.dtype, device=target)
        place = (tensor.storage_offset(), tensor.shape, tensor.stride())
        views.append(view.set_(there.untyped_storage(), *place))
    for tensor, view in zip(every, views, strict=True):
        tensor.data = view


def release_cached(device: torch.device | str) -> None:
    """Give memory that torch keeps for later back to a GPU, so that others may have it."""
    if torch.device(device).type == "cuda":
        torch.cuda.empty_cache()

"""Tensors on their way to the training device: nobody waits for a copy.

A copy from ordinary memory makes the host wait for the device; one from page-locked memory is queued
behind the work before it. torch keeps page-locked memory for later copies, and the memory of a copy until
it is done.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def is_on(tensor: Tensor, device: torch.device) -> bool:
    """True when the tensor is on the device; one without a number is any of its type."""
    here = tensor.device
    return here.type == device.type and device.index in (None, here.index)


def moved(tensor: Tensor, device: torch.device) -> Tensor:
    """Return the tensor on the device, itself where it is there already; the host does not wait."""
    if is_on(tensor, device):
        return tensor
    if device.type == "cuda" and tensor.device.type == "cpu":
        return tensor.pin_memory().to(device, non_blocking=True)
    # towards the CPU a copy that is not waited for could be read too early
    return tensor.to(device, non_blocking=device.type != "cpu")


def stacked(rows: Sequence[Tensor], device: torch.device) -> Tensor:
    """Return ``(B, ...)`` on the device; rows of the CPU are put together there and go as one copy."""
    if device.type == "cuda" and all(row.device.type == "cpu" for row in rows):
        first = rows[0]
        together = torch.empty((len(rows), *first.shape), dtype=first.dtype, pin_memory=True)
        torch.stack(list(rows), out=together)
        return together.to(device, non_blocking=True)
    return torch.stack([moved(row, device) for row in rows])


def columns(values: Sequence[Sequence[float]], device: torch.device) -> tuple[Tensor, ...]:
    """Return each sequence of numbers as ``(B,)`` float32 on the device; all go as one copy."""
    matrix = torch.tensor(values, dtype=torch.float32)
    return moved(matrix, device).unbind(0)

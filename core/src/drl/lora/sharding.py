"""Reading and writing parameters that may be sharded over ranks (DTensor, as FSDP2 makes them).

All functions are collectives when the parameter is sharded: every rank must call them, in the same
order.
"""

from __future__ import annotations

import torch
from torch.distributed.tensor import DTensor, distribute_tensor


def full_tensor(tensor: torch.Tensor) -> torch.Tensor:
    """Return the whole tensor, detached; a plain tensor is returned as it is, sharing memory."""
    detached = tensor.detach()
    return detached.full_tensor() if isinstance(detached, DTensor) else detached


def copy_into(
    parameter: torch.Tensor, value: torch.Tensor, *, from_first_rank: bool = False
) -> None:
    """Copy a whole ``value``, equal on all ranks, into a parameter; casts to its dtype and device.

    A sharded parameter takes its own slice of ``value`` without communication, or, where ranks may
    have computed values that differ, the slice that the first rank sends (``from_first_rank``).
    """
    with torch.no_grad():
        if isinstance(parameter, DTensor):
            value = distribute_tensor(
                value.to(device=parameter.device, dtype=parameter.dtype),
                parameter.device_mesh,
                parameter.placements,
                src_data_rank=0 if from_first_rank else None,
            )
        parameter.copy_(value)


def copy_parameter(target: torch.Tensor, source: torch.Tensor) -> None:
    """Copy one parameter into another of the same shape, whether and however each is sharded."""
    with torch.no_grad():
        alike = isinstance(target, DTensor) and isinstance(source, DTensor)
        if alike and target.placements == source.placements:  # type: ignore[attr-defined]
            target.copy_(source.detach())
        else:
            copy_into(target, full_tensor(source))

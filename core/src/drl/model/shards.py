"""This rank's part of a tensor that may be sharded over ranks."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch.distributed.tensor import DTensor

if TYPE_CHECKING:
    from torch import Tensor


def local(tensor: Tensor) -> Tensor:
    """Return this rank's part, without a copy and without communication; a plain tensor itself."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor

"""Buckets for the contracts of engines and updaters."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from drl.interfaces.engine import LocalTensors, LoraFields, WeightBucket
from drl.mathematics.checksum import tensors_digest


def make_bucket(
    tensors: Mapping[str, Tensor],
    *,
    version: int,
    component: str = "transformer",
    index: int = 0,
    lora: LoraFields | None = None,
) -> WeightBucket:
    """Return a bucket of these tensors: "lora_merge" when ``lora`` is given, else "dense"."""
    return WeightBucket(
        component=component,
        version=version,
        index=index,
        payload="dense" if lora is None else "lora_merge",
        names=tuple(tensors),
        shapes=tuple(tuple(tensor.shape) for tensor in tensors.values()),
        dtypes=tuple(str(tensor.dtype).removeprefix("torch.") for tensor in tensors.values()),
        checksum=tensors_digest(tensors, tensors.values()),
        carrier=LocalTensors(tensors=tuple(tensors.values())),
        lora=lora,
    )

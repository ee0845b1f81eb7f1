"""Checks of a bucket that need no model: labels against tensors, checksum, version."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from drl.api import EngineError, WeightBucket
from drl.mathematics.checksum import tensors_digest

if TYPE_CHECKING:
    from torch import Tensor


def check_bucket(
    bucket: WeightBucket, version: int, payloads: frozenset[str], tensors: Sequence[Tensor]
) -> None:
    """Raise EngineError unless the bucket is what its labels say, and belongs to this update.

    ``tensors``: what came, in the order of the names: the carrier's own, or copies of them.
    """
    where = f"bucket {bucket.index} of {bucket.component}"
    if bucket.version != version:
        raise EngineError(f"{where} is of version {bucket.version}; the update makes {version}")
    if bucket.payload not in payloads:
        raise EngineError(
            f"{where} has payload {bucket.payload!r}; known are {', '.join(sorted(payloads))}"
        )
    if (bucket.lora is not None) != (bucket.payload == "lora_merge"):
        raise EngineError(f"{where}: rank and alpha belong to lora_merge buckets, and only to them")
    _check_labels(bucket, where, tensors)
    found = tensors_digest(bucket.names, tensors)
    if found != bucket.checksum:
        raise EngineError(
            f"{where} has checksum {found}, the sender computed {bucket.checksum}; the tensors "
            "changed on the way or since they were packed"
        )


def _check_labels(bucket: WeightBucket, where: str, tensors: Sequence[Tensor]) -> None:
    counts = {len(bucket.names), len(bucket.shapes), len(bucket.dtypes), len(tensors)}
    if len(counts) > 1:
        raise EngineError(
            f"{where} has {len(bucket.names)} names, {len(bucket.shapes)} shapes, "
            f"{len(bucket.dtypes)} dtypes and {len(tensors)} tensors"
        )
    if len(set(bucket.names)) < len(bucket.names):
        raise EngineError(f"{where} names a tensor twice: {', '.join(sorted(bucket.names))}")
    labels = zip(bucket.names, bucket.shapes, bucket.dtypes, tensors, strict=True)
    wrong = [
        f"{name} is labelled {shape} {dtype} but is {tuple(tensor.shape)} {tensor.dtype}"
        for name, shape, dtype, tensor in labels
        if tuple(shape) != tuple(tensor.shape)
        or dtype.removeprefix("torch.") != str(tensor.dtype).removeprefix("torch.")
    ]
    if wrong:
        raise EngineError(f"{where}: {'; '.join(wrong)}")

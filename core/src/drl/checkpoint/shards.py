"""``Shard``: this rank's part of a tensor, in the form in which DCP plans reads and writes.

A shard holds plain memory only, so that a staged copy on the CPU can stand for a tensor that is
sharded over GPUs. DCP knows objects with these dunder methods by what they are, not by a base class.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    MetadataIndex,
    TensorProperties,
)
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType
from torch.distributed.tensor import DTensor


@dataclass(frozen=True, slots=True, kw_only=True)
class Shard:
    """``local``: the part; ``shape``: of the whole tensor; ``offsets``: where the part begins.

    ``sharded``: other ranks hold other parts; else every rank holds the whole and one writes it.
    """

    local: torch.Tensor
    shape: torch.Size
    offsets: torch.Size
    sharded: bool

    def size(self) -> torch.Size:
        """Return the shape of the whole tensor; DCP compares it with the stored one."""
        return self.shape

    def map(self, change: Callable[[torch.Tensor], torch.Tensor]) -> Shard:
        """Return the shard with other memory of the same shape."""
        return Shard(
            local=change(self.local),
            shape=self.shape,
            offsets=self.offsets,
            sharded=self.sharded,
        )

    @property
    def chunk(self) -> ChunkStorageMetadata:
        """Place and size of the part."""
        return ChunkStorageMetadata(offsets=self.offsets, sizes=self.local.size())

    def __create_write_items__(self, fqn: str, object: object) -> list[WriteItem]:
        """Return what this rank writes; nothing for an empty part of a sharded tensor."""
        if self.sharded and not self.local.numel():
            return []
        data = TensorWriteData(
            chunk=self.chunk, properties=TensorProperties(dtype=self.local.dtype), size=self.shape
        )
        kind = WriteItemType.SHARD if self.sharded else WriteItemType.TENSOR
        return [WriteItem(index=MetadataIndex(fqn, self.offsets), type=kind, tensor_data=data)]

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        """Return what this rank reads."""
        return [self.chunk] if self.local.numel() else []

    def __get_tensor_shard__(self, index: MetadataIndex) -> torch.Tensor:
        """Return the memory that is written or read into."""
        return self.local


def shard_of(tensor: torch.Tensor) -> Shard:
    """Return this rank's part of a tensor, sharing its memory: the whole of a plain one."""
    detached = tensor.detach()
    if not isinstance(detached, DTensor):
        origin = torch.Size([0] * detached.dim())
        return Shard(local=detached, shape=detached.shape, offsets=origin, sharded=False)
    chunks = detached.__create_chunk_list__()
    local = detached.to_local()
    offsets = torch.Size(chunks[0].offsets if chunks else [0] * detached.dim())
    return Shard(local=local, shape=detached.shape, offsets=offsets, sharded=True)

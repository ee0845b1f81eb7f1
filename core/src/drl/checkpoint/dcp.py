"""Tensors by name to and from a folder of torch's distributed checkpoint format (DCP).

Only tensors, never Python objects. Writing is collective over a process group; reading is not, because
each rank finds the parts it needs by itself, whatever number of ranks wrote them.
"""

from __future__ import annotations

import logging
import math
import os
import warnings
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, BinaryIO, cast

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, StorageMeta
from torch.distributed.checkpoint.planner import SavePlan, WriteItem
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from drl.checkpoint.restricted import entries, read_metadata
from drl.checkpoint.shards import Shard, shard_of
from drl.errors import CheckpointError

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

THREADS = 4
"""Files, and threads, per rank: one thread turns 1 to 2 GB a second into a file."""

SUFFIX = ".distcp"
"""As DCP's own writer names its files."""

BOUNCE = 256 * 2**20
"""Bytes of pinned memory per thread at most."""

SMALL = 64 * 2**20
"""Bytes of a rank's part from which several threads are worth it."""


class SavePlanner(dcp.DefaultSavePlanner):
    """Finds the memory of ``Shard`` objects."""

    def lookup_object(self, index: MetadataIndex) -> Any:
        """Return the tensor that is written for an entry."""
        return self.state_dict[index.fqn].local


class LoadPlanner(dcp.DefaultLoadPlanner):
    """Reads into the memory of ``Shard`` objects."""

    def set_up_planner(
        self,
        state_dict: dict[str, Any],
        metadata: Metadata | None = None,
        is_coordinator: bool = False,
    ) -> None:
        """Take the targets as they are; none of them is on the meta device."""
        self.original_state_dict = self.state_dict = state_dict
        self.metadata = metadata
        self.is_coordinator = is_coordinator

    def lookup_tensor(self, index: MetadataIndex) -> torch.Tensor:
        """Return the tensor that is read into."""
        local: torch.Tensor = self.state_dict[index.fqn].local
        return local


class Writer(FileSystemWriter):
    """Writes with several threads, and no path or random id: equal states give equal files.

    The threads are drl's: DCP's own print their errors and lose them, and the checkpoint would lack
    what they should have written.
    """

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.folder = folder

    def write_data(self, plan: SavePlan, planner: dcp.SavePlanner) -> Future[list[WriteResult]]:
        """Write the parts of a plan side by side, each into one file; the first error is raised."""
        with ThreadPoolExecutor(THREADS, thread_name_prefix="drl-write") as pool:
            write = partial(write_items, planner, self.folder)
            parts = parts_of(plan.items)
            names = [f"{plan.storage_data.prefix}{n}{SUFFIX}" for n in range(len(parts))]
            written = list(pool.map(write, names, parts))
        results: Future[list[WriteResult]] = Future()
        results.set_result([result for part in written for result in part])
        return results

    def storage_meta(self) -> StorageMeta | None:
        """Return nothing that depends on where or when the checkpoint was written."""
        return StorageMeta()


class Reader(FileSystemReader):
    """Reads the tensors of metadata that was read, and checked, before."""

    def __init__(self, folder: Path, metadata: Metadata) -> None:
        super().__init__(folder)
        self.known = metadata

    def read_metadata(self) -> Metadata:
        """Return the metadata; DCP's own method would unpickle the file."""
        return self.known


def write_items(
    planner: dcp.SavePlanner, folder: Path, name: str, items: Sequence[WriteItem]
) -> list[WriteResult]:
    """Write entries one after another into a file, flushed to disk; return where each lies."""
    results = []
    host = HostCopy(max(map(bytes_of, items), default=0))
    with (folder / name).open("xb") as file:
        stream = Stream(file)
        for item in items:
            offset = file.tell()
            stream.save(host.of(cast("torch.Tensor", planner.resolve_data(item))))
            length = file.tell() - offset
            place = _StorageInfo(relative_path=name, offset=offset, length=length)
            results.append(WriteResult(index=item.index, size_in_bytes=length, storage_data=place))
        file.flush()
        os.fsync(file.fileno())
    return results


class Stream:
    """A file for ``torch.save``, which makes errors of its own out of what a write raises."""

    def __init__(self, file: BinaryIO) -> None:
        self.file = file
        self.error: OSError | None = None

    def save(self, tensor: torch.Tensor) -> None:
        """Append a tensor in torch's format; OSError for what the disk refuses."""
        try:
            torch.save(tensor, cast("IO[bytes]", self))
        except RuntimeError as error:
            raise self.error or error from error

    def write(self, data: bytes) -> int:
        """Write, and remember what went wrong."""
        try:
            return self.file.write(data)
        except OSError as error:
            self.error = error
            raise

    def flush(self) -> None:
        """Leave it to the file."""


class HostCopy:
    """Brings tensors of a GPU to the host one at a time, through one pinned buffer.

    New memory for each would cost more than the copy: a system hands out pages slowly.
    """

    def __init__(self, largest: int) -> None:
        self.bytes = min(largest, BOUNCE)
        self.buffer: torch.Tensor | None = None
        self.stream: torch.cuda.Stream | None = None

    def of(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the tensor on the CPU, in memory of its own size; valid until the next call."""
        if not tensor.is_cuda:
            whole = tensor.untyped_storage().nbytes() == tensor.nbytes
            return tensor if whole else tensor.clone()
        if self.stream is None:
            self.stream = torch.cuda.Stream(tensor.device)  # beside what training does
        with torch.cuda.stream(self.stream):
            if not 0 < tensor.nbytes <= self.bytes:
                return tensor.cpu()
            if self.buffer is None:
                self.buffer = torch.empty(self.bytes, dtype=torch.uint8, pin_memory=True)
            # a storage of its own size: torch.save writes whole storages
            part = self.buffer.numpy()[: tensor.nbytes]
            place = torch.frombuffer(part, dtype=tensor.dtype).view(tensor.shape)
            place.copy_(tensor, non_blocking=True)
            self.stream.synchronize()
        return place


def parts_of(items: Sequence[WriteItem]) -> list[list[WriteItem]]:
    """Divide entries into parts of about equal bytes; one part when there is little to write."""
    sizes = [bytes_of(item) for item in items]
    count = THREADS if sum(sizes) > SMALL else 1
    parts: list[list[WriteItem]] = [[] for _ in range(count)]
    filled = [0] * count
    for item, size in sorted(zip(items, sizes, strict=True), key=lambda pair: -pair[1]):
        place = filled.index(min(filled))
        parts[place].append(item)
        filled[place] += size
    return [part for part in parts if part]


def bytes_of(item: WriteItem) -> int:
    """Return the bytes that a rank writes for an entry."""
    data = item.tensor_data
    assert data is not None
    assert data.chunk is not None
    return math.prod(data.chunk.sizes) * data.properties.dtype.itemsize


def write_tensors(
    tensors: Mapping[str, Shard], folder: Path, *, group: ProcessGroup | None = None
) -> None:
    """Write tensors into a new folder, flushed to disk; every rank of ``group`` calls it with its parts.

    Raises OSError for what the disk refuses, on every rank when it happens on one.
    """
    quiet()
    try:
        dcp.save(
            dict(tensors),
            storage_writer=Writer(folder),
            planner=SavePlanner(flatten_state_dict=False, flatten_sharded_tensors=False),
            process_group=group,
            no_dist=group is None,
        )
    except CheckpointException as failed:  # derives from BaseException
        raise OSError(reason(failed)) from failed


def read_tensors(folder: Path, targets: Mapping[str, Shard], metadata: Metadata) -> None:
    """Read into the memory of ``targets``; names and shapes were compared with ``metadata`` before.

    Raises CheckpointError for files that are damaged.
    """
    if not targets:
        return
    quiet()
    try:
        dcp.load(
            dict(targets),
            storage_reader=Reader(folder, metadata),
            planner=LoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False),
            no_dist=True,
        )
    except CheckpointException as failed:
        raise CheckpointError(
            f"{folder} cannot be read: {reason(failed)}\nuse an earlier checkpoint of the run"
        ) from failed


def read_whole(folder: Path, *, trust: bool = False) -> dict[str, torch.Tensor]:
    """Return every tensor of a folder, whole and on the CPU, in the stored dtypes."""
    metadata = read_metadata(folder, trust=trust)
    tensors = {
        name: torch.empty(entry.size, dtype=entry.properties.dtype)
        for name, entry in entries(metadata).items()
    }
    read_tensors(folder, {name: shard_of(tensor) for name, tensor in tensors.items()}, metadata)
    return tensors


def reason(failed: CheckpointException) -> str:
    """Return what went wrong, on which rank, without tracebacks."""
    rank, (error, _) = sorted(failed.failures.items())[0]
    where = f"rank {rank}: " if len(failed.failures) > 1 or rank else ""
    return f"{where}{type(error).__name__}: {error}"


def quiet() -> None:
    """Keep torch from warning that one process saves as one, and from two log lines per tensor."""
    logging.getLogger("c10d-NullHandler-dcp_logger").setLevel(logging.WARNING)
    warnings.filterwarnings("ignore", message="torch.distributed is disabled", category=UserWarning)

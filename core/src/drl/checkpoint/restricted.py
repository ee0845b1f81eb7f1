"""Metadata of a torch distributed checkpoint (DCP), read without running what it says.

DCP writes ``.metadata`` as a pickle, and a pickle is a program. Here it is read with an allow-list of
operations and of names; in place of every class stands an empty record that is made for this one file, so
nothing of torch is called or changed while it is read. The real objects are built afterwards, from
values that were checked: names, shapes, and places inside files of the same folder.
"""

from __future__ import annotations

import io
import math
import pickle
import pickletools
import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

from drl.errors import CheckpointError

METADATA = ".metadata"
LARGEST = 64 * 2**20
"""Bytes of metadata that are read at all; 10,000 tensors on 8 ranks need about 20 MB."""

_RECORDS = frozenset(
    {
        ("torch.distributed.checkpoint.metadata", "Metadata"),
        ("torch.distributed.checkpoint.metadata", "TensorStorageMetadata"),
        ("torch.distributed.checkpoint.metadata", "BytesStorageMetadata"),
        ("torch.distributed.checkpoint.metadata", "TensorProperties"),
        ("torch.distributed.checkpoint.metadata", "ChunkStorageMetadata"),
        ("torch.distributed.checkpoint.metadata", "MetadataIndex"),
        ("torch.distributed.checkpoint.metadata", "StorageMeta"),
        ("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
    }
)
_CALLS = frozenset(
    {
        ("torch", "Size"),
        ("torch.serialization", "_get_layout"),
        ("torch.distributed.checkpoint.metadata", "_MEM_FORMAT_ENCODING"),
        ("pathlib", "PosixPath"),
        ("pathlib._local", "PosixPath"),
    }
)
_OPERATIONS = re.compile(
    r"PROTO|FRAME|STOP|MARK|MEMOIZE|(LONG_)?BIN(PUT|GET)|NONE|NEW(TRUE|FALSE|OBJ)|BININT[12]?|LONG1|"
    r"(SHORT_)?BINUNICODE|EMPTY_(DICT|LIST|TUPLE)|TUPLE[123]?|APPENDS?|SETITEMS?|(STACK_)?GLOBAL|REDUCE|BUILD"
)
_FILE = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]*")


def read_metadata(folder: Path, *, trust: bool = False) -> Metadata:
    """Return the metadata of a DCP folder. ``trust`` runs the pickle as it is, whatever it does.

    Raises CheckpointError for names and operations that DCP does not write, for entries that are no
    tensors, and for places outside the folder's own files.
    """
    file = folder / METADATA
    try:
        content = _content(file)
        if trust:
            metadata = pickle.loads(content)
            if not isinstance(metadata, Metadata):
                raise Refused(f"it holds {type(metadata).__name__}, not DCP's Metadata")
            return metadata
        scan(content)
        return _metadata(_Restricted(content).load(), folder)
    except OSError as error:
        raise CheckpointError(f"{file} cannot be read: {error.strerror or error}") from error
    except Refused as error:
        raise CheckpointError(
            f"{file} is refused: {error}\nit was not run; if you know who wrote this checkpoint and trust "
            "them with your account, add --trust-checkpoint"
        ) from error
    # whatever a damaged pickle raises, it is the same to the reader
    except Exception as error:
        raise CheckpointError(
            f"{file} is damaged: {type(error).__name__}: {error}\nuse an earlier checkpoint of the run"
        ) from error


def entries(metadata: Metadata) -> dict[str, TensorStorageMetadata]:
    """Return what is stored by name; CheckpointError for an entry that is no tensor."""
    found = {}
    for name, entry in metadata.state_dict_metadata.items():
        if not isinstance(entry, TensorStorageMetadata):
            raise CheckpointError(
                f"'{name}' is a pickled Python object; only tensors are read from a checkpoint"
            )
        found[name] = entry
    return found


class Refused(Exception):
    """What the metadata holds that DCP never writes for tensors."""


def _content(file: Path) -> bytes:
    size = file.stat().st_size
    if size > LARGEST:
        raise Refused(f"it has {size} bytes, and at most {LARGEST} are read")
    return file.read_bytes()


def scan(content: bytes) -> None:
    """Raise Refused for an operation that DCP does not write, before any of them is carried out."""
    for operation, argument, _ in pickletools.genops(content):
        if not _OPERATIONS.fullmatch(operation.name):
            raise Refused(f"it uses the pickle operation {operation.name}")
        if operation.name.endswith("BINPUT") and int(argument or 0) > len(content):
            raise Refused("it asks for more memory than it has content")


class _Record:
    """Stands in for an object: keeps the state that the pickle gives it."""

    def __setstate__(self, state: object) -> None:
        self.__dict__["given"] = state


class _Restricted(pickle.Unpickler):
    """Knows the names that DCP writes; each stands for a record or a harmless function of this file."""

    def __init__(self, content: bytes) -> None:
        super().__init__(io.BytesIO(content))
        self._known: dict[tuple[str, str], Any] = {}

    def find_class(self, module: str, name: str) -> Any:
        """Return the stand-in of a name, or raise Refused with it."""
        place = (module, name)
        if place not in self._known:
            self._known[place] = self._stand_in(place)
        return self._known[place]

    def _stand_in(self, place: tuple[str, str]) -> Any:
        module, name = place
        if place in _RECORDS:
            return type(name, (_Record,), {})
        if place in _CALLS:
            return _sizes() if name == "Size" else _first()
        if module == "torch" and isinstance(vars(torch).get(name), torch.dtype):
            return vars(torch)[name]
        raise Refused(f"it names {module}.{name}, which DCP does not write for tensors")


def _sizes() -> Callable[[object], tuple[int, ...]]:
    """Return a fresh function, so that a pickle can change nothing that outlives it."""

    def sizes(values: object) -> tuple[int, ...]:
        if not isinstance(values, tuple) or not all(type(v) is int and v >= 0 for v in values):
            raise Refused(f"it has the shape {values!r}")
        return values

    return sizes


def _first() -> Callable[..., object]:
    def first(*values: object) -> object:
        return values[0] if values else None

    return first


def _metadata(raw: object, folder: Path) -> Metadata:
    fields = _fields(raw, "Metadata")
    entries = _mapping(fields.get("state_dict_metadata"), "state_dict_metadata")
    places = _mapping(fields.get("storage_data"), "storage_data")
    storage = dict(_place(index, info, folder) for index, info in places.items())
    tensors = {_text(name): _tensor(_text(name), entry) for name, entry in entries.items()}
    for name, tensor in tensors.items():
        _check_tensor(name, tensor, storage)
    return Metadata(state_dict_metadata=dict(tensors), storage_data=storage)


def _fields(raw: object, kind: str) -> dict[str, Any]:
    """Return the attributes of a record of one kind."""
    if not isinstance(raw, _Record) or type(raw).__name__ != kind:
        raise Refused(f"where {kind} belongs it has {type(raw).__name__}")
    given = vars(raw).get("given")
    return _mapping(given, kind)


def _mapping(value: object, what: str) -> dict[Any, Any]:
    if not isinstance(value, dict):
        raise Refused(f"its {what} is {type(value).__name__}, not a table")
    return value


def _text(value: object) -> str:
    if not isinstance(value, str):
        raise Refused(f"where a name belongs it has {type(value).__name__}")
    return value


def _shape(value: object) -> torch.Size:
    if not isinstance(value, tuple) or not all(type(v) is int for v in value):
        raise Refused(f"where a shape belongs it has {value!r}")
    return torch.Size(value)


def _tensor(name: str, raw: object) -> TensorStorageMetadata:
    if type(raw).__name__ == "BytesStorageMetadata":
        raise Refused(f"'{name}' is a pickled Python object; only tensors are read")
    fields = _fields(raw, "TensorStorageMetadata")
    properties = fields.get("properties")
    if not isinstance(properties, _Record) or type(properties).__name__ != "TensorProperties":
        raise Refused(f"'{name}' has no tensor properties")
    given = vars(properties).get("given")
    if not isinstance(given, tuple) or not given or not isinstance(given[0], torch.dtype):
        raise Refused(f"'{name}' has no dtype")
    chunks = fields.get("chunks")
    if not isinstance(chunks, list):
        raise Refused(f"'{name}' has no list of chunks")
    return TensorStorageMetadata(
        properties=TensorProperties(dtype=given[0]),
        size=_shape(fields.get("size")),
        chunks=[_chunk(chunk) for chunk in chunks],
    )


def _chunk(raw: object) -> ChunkStorageMetadata:
    fields = _fields(raw, "ChunkStorageMetadata")
    return ChunkStorageMetadata(
        offsets=_shape(fields.get("offsets")), sizes=_shape(fields.get("sizes"))
    )


def _place(raw: object, info: object, folder: Path) -> tuple[MetadataIndex, _StorageInfo]:
    index, where = _fields(raw, "MetadataIndex"), _fields(info, "_StorageInfo")
    name, file = _text(index.get("fqn")), _text(where.get("relative_path"))
    if not _FILE.fullmatch(file):
        raise Refused(f"'{name}' lies in {file!r}, which is no file of this folder")
    if where.get("transform_descriptors"):
        raise Refused(f"'{name}' is stored through extensions, which are not read")
    offset, length = where.get("offset"), where.get("length")
    if type(offset) is not int or type(length) is not int or offset < 0 or length < 0:
        raise Refused(f"'{name}' has no place in {file}")
    path = folder / file
    size = path.stat().st_size
    if offset + length > size:
        raise CheckpointError(
            f"{path} is cut short: it has {size} bytes, and '{name}' ends at {offset + length}\n"
            "use an earlier checkpoint of the run"
        )
    place = index.get("offset")
    key = MetadataIndex(name, None if place is None else _shape(place))
    return key, _StorageInfo(relative_path=file, offset=offset, length=length)


def _check_tensor(
    name: str, tensor: TensorStorageMetadata, storage: Mapping[MetadataIndex, _StorageInfo]
) -> None:
    """Check that the chunks fill the tensor and that each has its bytes."""
    for chunk in tensor.chunks:
        info = storage.get(MetadataIndex(name, chunk.offsets))
        if info is None:
            raise Refused(f"'{name}' has a chunk without a place")
        if info.length < math.prod(chunk.sizes) * tensor.properties.dtype.itemsize:
            raise Refused(f"'{name}' has fewer bytes than its shape {list(chunk.sizes)} needs")
        if any(_outside(tensor.size, chunk)):
            raise Refused(f"'{name}' has a chunk outside its shape {list(tensor.size)}")
    if sum(math.prod(chunk.sizes) for chunk in tensor.chunks) != math.prod(tensor.size):
        raise Refused(f"the chunks of '{name}' do not fill its shape {list(tensor.size)}")


def _outside(size: torch.Size, chunk: ChunkStorageMetadata) -> Iterator[bool]:
    yield len(chunk.offsets) != len(size) or len(chunk.sizes) != len(size)
    for whole, start, length in zip(size, chunk.offsets, chunk.sizes, strict=False):
        yield start < 0 or length < 0 or start + length > whole

"""Files of what passes between stages: one safetensors file, whose header holds the rest as JSON.

Samples, pairs and what they are made of become tables with the name of their class; tensors stay in the
file's own part and are named in the table. Reading makes nothing but these classes, so a file from
elsewhere can be wrong, and cannot run anything.
"""

from __future__ import annotations

import json
import math
import numbers
import os
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields, is_dataclass
from glob import escape
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from drl.errors import DataError, DrlError
from drl.observe.files import PARTIAL, flush_directory
from drl.types import (
    ConditionRecord,
    Group,
    Media,
    MediaFile,
    Pair,
    Prompt,
    Sample,
    Sampling,
    Score,
    Trajectory,
)

RECORDS: Mapping[str, type[Any]] = {
    kind.__name__: kind
    for kind in (
        ConditionRecord,
        Group,
        Media,
        MediaFile,
        Pair,
        Prompt,
        Sample,
        Sampling,
        Score,
        Trajectory,
    )
}
"""Classes that a file may hold."""

KEY = "drl"
VERSION = 1
MARK = "$"
"""What the key of a table begins with that stands for something JSON does not have."""


class Packer:
    """Turns values into JSON ones; tensors are gathered in ``tensors``, each of them once."""

    def __init__(self) -> None:
        self.tensors: dict[str, Tensor] = {}
        self._names: dict[tuple[object, ...], str] = {}
        self._kept: list[Tensor] = []

    def pack(self, value: Any, where: str = "") -> Any:
        """Return the JSON form of a value; DataError names the place of what has none."""
        if is_dataclass(value) and type(value) is RECORDS.get(type(value).__name__):
            return self._record(value, where)
        for kind, form in FORMS:
            if isinstance(value, kind):
                return form(self, value, where)
        raise DataError(
            f"a dump holds numbers, text, lists, tables and tensors, but {where or 'it'} is a "
            f"{type(value).__name__}"
        )

    def _record(self, value: Any, where: str) -> dict[str, Any]:
        parts = {f.name: value.__getattribute__(f.name) for f in fields(value)}
        packed = {name: self.pack(part, f"{where}.{name}") for name, part in parts.items()}
        return {f"{MARK}record": type(value).__name__, **packed}

    def _mapping(self, value: Mapping[Any, Any], where: str) -> Any:
        if all(isinstance(key, str) and not key.startswith(MARK) for key in value):
            return {key: self.pack(item, f"{where}.{key}") for key, item in value.items()}
        pairs = [[self.pack(k, where), self.pack(v, f"{where}.{k}")] for k, v in value.items()]
        return {"$table": pairs}

    def _items(self, value: Sequence[Any], where: str) -> list[Any]:
        return [self.pack(item, f"{where}[{place}]") for place, item in enumerate(value)]

    def _name(self, tensor: Tensor) -> str:
        place = (tensor.device, tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride())
        if tensor.numel() == 0 or place not in self._names:
            name = str(len(self.tensors))
            self._names[place] = name
            self._kept.append(tensor)  # or its address might be given to another one
            # a copy: the file format refuses tensors that share memory
            self.tensors[name] = tensor.detach().to("cpu", copy=True).contiguous()
        return self._names[place]


# no table of bound methods: a packer that holds itself would hold its tensors until the collector comes
FORMS: Sequence[tuple[type | tuple[type, ...], Callable[[Packer, Any, str], Any]]] = (
    ((bool, str, type(None)), lambda packer, value, where: value),
    (numbers.Integral, lambda packer, value, where: int(value)),
    (numbers.Real, lambda packer, value, where: number(float(value))),
    (Tensor, lambda packer, value, where: {"$tensor": packer._name(value)}),
    (Path, lambda packer, value, where: {"$path": str(value)}),
    (bytes, lambda packer, value, where: {"$bytes": packer._name(bytes_tensor(value))}),
    (Mapping, Packer._mapping),
    (tuple, lambda packer, value, where: {"$tuple": packer._items(value, where)}),
    (list, Packer._items),
)


def number(value: float) -> Any:
    """Return a float as JSON has it, which knows no NaN and no infinity."""
    return value if math.isfinite(value) else {"$float": repr(value)}


def bytes_tensor(content: bytes) -> Tensor:
    """Return bytes as ``(N,)`` uint8."""
    return (
        torch.frombuffer(bytearray(content), dtype=torch.uint8)
        if content
        else torch.empty(0, dtype=torch.uint8)
    )


class Unpacker:
    """The counterpart of ``Packer``; raises KeyError, TypeError or ValueError for what it never writes."""

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        self._tensors = tensors

    def unpack(self, value: Any) -> Any:
        """Return the value of a JSON form."""
        if isinstance(value, list):
            return [self.unpack(item) for item in value]
        if not isinstance(value, dict):
            return value
        if "$record" in value:
            parts = {k: self.unpack(part) for k, part in value.items() if k != "$record"}
            return RECORDS[value["$record"]](**parts)
        for mark, form in MARKED.items():
            if mark in value:
                return form(self, value[mark])
        if any(key.startswith(MARK) for key in value):
            raise ValueError(f"there is no {sorted(value)}")
        return {key: self.unpack(item) for key, item in value.items()}


MARKED: Mapping[str, Callable[[Unpacker, Any], Any]] = {
    "$tensor": lambda unpacker, name: unpacker._tensors[name],
    "$path": lambda unpacker, text: Path(text),
    "$bytes": lambda unpacker, name: unpacker._tensors[name].numpy().tobytes(),
    "$float": lambda unpacker, text: float(text),
    "$tuple": lambda unpacker, items: tuple(unpacker.unpack(item) for item in items),
    "$table": lambda unpacker, pairs: {unpacker.unpack(k): unpacker.unpack(v) for k, v in pairs},
}


def write_dump(path: Path, kind: str, content: Mapping[str, Any]) -> None:
    """Write a file in one step: after a kill it is the old one, the new one, or not there.

    Raises DataError for what a file cannot hold, DrlError when the disk refuses it.
    """
    packer = Packer()
    table = {"kind": kind, "version": VERSION, **packer.pack(dict(content))}
    header = {KEY: json.dumps(table, allow_nan=False)}
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        _replace(path, packer.tensors, header)
    except (OSError, SafetensorError) as error:
        raise DrlError(
            f"{path} could not be written: {error}\nmake room there, or take the dumps out of [debug]"
        ) from error


def _replace(path: Path, tensors: Mapping[str, Tensor], header: dict[str, str]) -> None:
    for left in path.parent.glob(f".{escape(path.name)}.*{PARTIAL}"):
        left.unlink(missing_ok=True)  # of a process that was killed
    partial = path.with_name(f".{path.name}.{uuid.uuid4().hex[:12]}{PARTIAL}")
    try:
        save_file(dict(tensors), partial, metadata=header)
        with partial.open("rb+") as handle:
            os.fsync(handle.fileno())
        partial.replace(path)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise
    flush_directory(path.parent)


def read_dump(path: Path, kind: str) -> dict[str, Any]:
    """Return what ``write_dump`` wrote; DataError names the file and what is wrong with it."""
    try:
        with safe_open(path, framework="pt") as file:
            header = (file.metadata() or {}).get(KEY)
            if header is None:
                raise DataError(f"{path} is a safetensors file, but no dump of drl")
            table = json.loads(header)
            found = (table.pop("kind"), table.pop("version"))
            if found != (kind, VERSION):
                raise DataError(
                    f"{path} is '{found[0]}' of format {found[1]}, not '{kind}' of format {VERSION}"
                )
            names = file.keys()
            content = Unpacker({name: file.get_tensor(name) for name in names}).unpack(table)
    except FileNotFoundError as error:
        raise DataError(f"there is no file {path}") from error
    except (
        OSError,
        SafetensorError,
        RecursionError,
        AttributeError,
        KeyError,
        TypeError,
        ValueError,
    ) as error:
        if isinstance(error, DataError):
            raise
        raise DataError(f"{path} cannot be read as a dump of drl: {error!r}") from error
    if not isinstance(content, dict):
        raise DataError(f"{path} cannot be read as a dump of drl: it holds no table")
    return content

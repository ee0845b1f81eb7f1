"""Headers of safetensors files: names, shapes, dtypes and metadata, without the tensors and without torch."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from safetensors import SafetensorError, safe_open

from drl.errors import BadInput

ITEM_BYTES = {"F64": 8, "I64": 8, "U64": 8, "F32": 4, "I32": 4, "U32": 4, "F16": 2, "BF16": 2} | {
    "I16": 2,
    "U16": 2,
}
"""Bytes of one element; every other dtype of the format has one."""


@dataclass(frozen=True, slots=True)
class TensorFacts:
    """What a header says of one tensor; ``dtype`` as safetensors spells it ("F32", "BF16")."""

    dtype: str
    shape: tuple[int, ...]

    @property
    def bytes(self) -> int:
        """Size of the data."""
        return math.prod(self.shape) * ITEM_BYTES.get(self.dtype, 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class Header:
    """The header of one file: its free-form metadata, and its tensors in file order."""

    path: Path
    metadata: Mapping[str, str]
    tensors: Mapping[str, TensorFacts]


def read_header(path: Path) -> Header:
    """Read the header of a safetensors file; its time does not depend on the size of the file.

    Raises BadInput when the file is missing, empty, truncated or no safetensors file.
    """
    try:
        with safe_open(path, framework="np") as file:
            slices = {name: file.get_slice(name) for name in file.offset_keys()}
            tensors = {
                name: TensorFacts(part.get_dtype(), tuple(part.get_shape()))
                for name, part in slices.items()
            }
            return Header(path=path, metadata=file.metadata() or {}, tensors=tensors)
    except (SafetensorError, OSError) as error:
        raise BadInput(unreadable(path, error)) from error


def unreadable(path: Path, error: Exception) -> str:
    """Say why a safetensors file cannot be read."""
    if not path.exists():
        return f"{path} does not exist"
    if path.is_dir():
        return f"{path} is a directory, not a safetensors file"
    if path.stat().st_size == 0:
        return f"{path} is empty; copy it again"
    return (
        f"{path} cannot be read as safetensors: it is damaged, truncated or another format ({error}); "
        "copy it again"
    )

"""Safetensors files whose bytes follow from their content."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

from safetensors.torch import save_file
from torch import Tensor

FORMAT = {"format": "pt"}
"""What other tools look for in a header before they take its tensors for torch's."""


def save_tensors(path: Path, tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> None:
    """Write tensors and free-form metadata; equal content gives equal bytes."""
    # Copies: safetensors refuses tensors that are strided or share memory.
    own = {
        key: tensor.detach().to("cpu", copy=True).contiguous() for key, tensor in tensors.items()
    }
    save_file(own, path, metadata={**FORMAT, **metadata})
    sort_metadata(path)


def sort_metadata(path: Path) -> None:
    """Bring the metadata of a file into order: safetensors sorts tensors, but metadata it writes at random."""
    with path.open("r+b") as file:
        size = int.from_bytes(file.read(8), "little")
        header = json.loads(file.read(size))
        header["__metadata__"] = dict(sorted(header["__metadata__"].items()))
        text = json.dumps(header, ensure_ascii=False, separators=(",", ":")).encode().ljust(size)
        if len(text) != size:
            return  # the tensors begin behind the header, and only an order is at stake
        file.seek(8)
        file.write(text)

"""``EncodedFiles``: a folder of encoded media and texts, each named by everything that decides its content.

A file is safetensors: the tensors, and in its metadata the whole key, the values that are no tensors and a
digest of the tensors, as one JSON text, so that equal content is equal bytes. A file that is torn, damaged
or another key's is as good as absent.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save

from drl.errors import ContractError, DataError
from drl.mathematics.checksum import tensors_digest
from drl.observe.files import PARTIAL, write_bytes_atomic

if TYPE_CHECKING:
    from torch import Tensor

FOLDER = ".sft_cache"
"""Name of the folder beside the data."""

LABEL = "drl"
"""Name of the JSON text in a file's metadata."""

STALE_S = 3600.0
"""A file that was begun this long ago and not finished belongs to a process that was killed."""

Key = Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Encoded:
    """What one file holds: tensors by name, and values that are no tensors."""

    tensors: Mapping[str, Tensor]
    values: Mapping[str, Any]


def canonical(key: Key) -> str:
    """Return the one JSON text of a key."""
    return json.dumps(key, sort_keys=True, ensure_ascii=True, allow_nan=False)


def label_of(metadata: Mapping[str, str] | None, key: Key) -> dict[str, Any] | None:
    """Return what a file says of itself; None when it is not the file of this key."""
    try:
        label = json.loads((metadata or {}).get(LABEL, "null"))
    except (ValueError, RecursionError):
        return None
    if not isinstance(label, dict) or label.keys() != {"key", "values", "digest"}:
        return None
    return label if label["key"] == key and isinstance(label["values"], dict) else None


@dataclass(frozen=True, slots=True)
class EncodedFiles:
    """Files of one folder; several processes may share it."""

    folder: Path

    def file(self, key: Key) -> Path:
        """Return where a key's file lies; ``key["what"]`` is the end of its name."""
        name = sha256(canonical(key).encode()).hexdigest()[:16]
        return self.folder / f"{name}.{key['what']}.safetensors"

    def has(self, key: Key) -> bool:
        """True when the key's file is there, complete and its own; the tensors are not read."""
        try:
            with safe_open(self.file(key), framework="np") as file:
                return label_of(file.metadata(), key) is not None
        except (SafetensorError, OSError):
            return False

    def read(self, key: Key) -> Encoded | None:
        """Return what was written under a key; None when there is nothing whole."""
        try:
            with safe_open(self.file(key), framework="pt") as file:
                label = label_of(file.metadata(), key)
                # copies: the file may be replaced while its tensors are in use
                tensors = {name: file.get_tensor(name).clone() for name in file.keys()}  # noqa: SIM118
        except (SafetensorError, OSError):
            return None
        if label is None or label["digest"] != tensors_digest(tensors.keys(), tensors.values()):
            return None
        return Encoded(tensors=tensors, values=label["values"])

    def write(self, key: Key, tensors: Mapping[str, Tensor], values: Mapping[str, Any]) -> None:
        """Write a key's file beside and rename it; ContractError for values that JSON does not hold."""
        # copies: safetensors refuses tensors that share memory, as two views of one output do
        plain = {
            name: tensor.detach().cpu().clone(memory_format=torch.contiguous_format)
            for name, tensor in tensors.items()
        }
        digest = tensors_digest(plain.keys(), plain.values())
        try:
            label = canonical({"key": key, "values": dict(values), "digest": digest})
        except (TypeError, ValueError) as error:
            raise ContractError(
                f"the values of a ConditionRecord must be such that JSON can hold them: {error}"
            ) from error
        try:
            write_bytes_atomic(self.file(key), save(plain, {LABEL: label}))
        except OSError as error:
            raise self._refused(error) from error

    def discard(self, key: Key) -> None:
        """Remove a key's file, when there is one."""
        try:
            self.file(key).unlink(missing_ok=True)
        except OSError as error:
            raise self._refused(error) from error

    def prepare(self) -> None:
        """Make the folder, and tidy up what killed processes left; DataError when nothing can be written."""
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            probe = self.folder / ".probe"
            write_bytes_atomic(probe, b"")
            probe.unlink(missing_ok=True)
            for file in self.folder.glob(f".*{PARTIAL}"):
                if time.time() - file.stat().st_mtime > STALE_S:
                    file.unlink(missing_ok=True)
        except OSError as error:
            raise self._refused(error) from error

    def _refused(self, error: OSError) -> DataError:
        return DataError(
            f"data.sft_cache: encoded media cannot be written to {self.folder} ({error}); "
            "set data.sft_cache to a folder that can be written"
        )

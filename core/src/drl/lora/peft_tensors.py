"""Tensors of a PEFT directory: reading the file, checking the pairs (lora.md 3.2).

A state here has keys ``<fqn>.lora_A.weight`` [rank, in] and ``<fqn>.lora_B.weight`` [out, rank].
"""

from __future__ import annotations

import pickle
import struct
import warnings
import zipfile
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file

from drl.lora.config import LoraConfig
from drl.lora.errors import AdapterNotFound, LoraError, name_list
from drl.lora.naming import MATRICES, PEFT_PREFIX, adapter_key
from drl.lora.state import check_values

WEIGHTS_FILE = "adapter_model.safetensors"
PICKLE_FILE = "adapter_model.bin"
# A damaged pickle makes the unpickler fail anywhere in its stack machine.
DAMAGED_PICKLE = (
    pickle.UnpicklingError,
    zipfile.BadZipFile,
    struct.error,
    RuntimeError,
    OSError,
    EOFError,
    MemoryError,
    ValueError,
    LookupError,
    TypeError,
    AttributeError,
    AssertionError,
    ArithmeticError,
)
# Components that make a key an adapter tensor, whichever LoRA variant wrote it.
ADAPTER_COMPONENTS = frozenset(
    {*MATRICES, "lora_embedding_A", "lora_embedding_B", "lora_magnitude_vector"}
)


def read_tensors(directory: Path) -> dict[str, torch.Tensor]:
    """Read the tensor file of an adapter directory; safetensors is preferred over ``.bin``.

    Raises ``AdapterNotFound`` when there is neither and ``LoraError`` for a damaged file, or for a
    ``.bin`` that holds anything but tensors: it is opened with ``weights_only=True``.
    """
    safe, pickled = directory / WEIGHTS_FILE, directory / PICKLE_FILE
    if safe.exists():
        return _read_safetensors(safe)
    if pickled.exists():
        return _read_pickle(pickled)
    raise AdapterNotFound(
        f"{directory} has no adapter weights: neither {WEIGHTS_FILE} nor {PICKLE_FILE} exists"
    )


def state_of_file(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Turn file keys into state keys.

    Adapter tensors must be spelled ``base_model.model.<fqn>.lora_A.weight`` (or B); any other
    spelling raises ``LoraError``. Keys that are no adapter tensors are skipped with a warning.
    """
    state: dict[str, torch.Tensor] = {}
    strays, refused = [], []
    for key, tensor in tensors.items():
        plain = key.removeprefix(PEFT_PREFIX)
        components = plain.split(".")
        if not ADAPTER_COMPONENTS & set(components):
            strays.append(key)
        elif plain == key or not _is_pair_key(components):
            refused.append(key)
        else:
            state[plain] = tensor
    if refused:
        raise LoraError(
            f"unexpected adapter keys: {name_list(sorted(refused))}; expected "
            f"{PEFT_PREFIX}<module path>.lora_A.weight or .lora_B.weight without an adapter name. "
            "Keys of DoRA, lora_bias, embeddings or experts are not supported"
        )
    if strays:
        warnings.warn(f"no adapter tensors, ignored: {name_list(sorted(strays))}", stacklevel=4)
    return state


def check_pairs(state: Mapping[str, torch.Tensor], config: LoraConfig) -> tuple[str, ...]:
    """Return the adapted module paths in the state's order; raise ``LoraError`` if it is unsound.

    Each module needs a 2-D pair of finite floating tensors whose rank is the one of ``config``.
    """
    fqns = list(dict.fromkeys(key.rsplit(".", 2)[0] for key in state))
    keys = [adapter_key(fqn, matrix) for fqn in fqns for matrix in MATRICES]
    missing = [key for key in keys if key not in state]
    if missing:
        raise LoraError(f"missing adapter keys: {name_list(missing)}; a pair is lora_A and lora_B")
    unexpected = sorted(set(state) - set(keys))
    if unexpected:
        raise LoraError(
            f"unexpected adapter keys: {name_list(unexpected)}; a key ends in lora_A.weight or "
            "lora_B.weight"
        )
    if not fqns:
        raise LoraError(
            "all lora keys are missing: there is no adapter tensor; expected pairs "
            f"{PEFT_PREFIX}<module path>.lora_A.weight and .lora_B.weight"
        )
    for fqn in fqns:
        _check_pair(
            fqn,
            state[adapter_key(fqn, "lora_A")],
            state[adapter_key(fqn, "lora_B")],
            config.rank_of(fqn),
        )
    return tuple(fqns)


def _check_pair(fqn: str, A: torch.Tensor, B: torch.Tensor, rank: int) -> None:
    for matrix, tensor in zip(MATRICES, (A, B), strict=True):
        if tensor.dim() != 2:
            raise LoraError(
                f"{adapter_key(fqn, matrix)} has shape {list(tensor.shape)}; only 2-D adapters of "
                "Linear layers are supported (convolutions and stacked experts are not)"
            )
        check_values(adapter_key(fqn, matrix), tensor)
    if A.shape[0] != B.shape[1]:
        raise LoraError(
            f"the ranks of A and B differ at {fqn}: lora_A {list(A.shape)}, lora_B "
            f"{list(B.shape)}; shapes must be [rank, in] and [out, rank]"
        )
    if A.shape[0] != rank:
        raise LoraError(
            f"rank mismatch at {fqn}: the tensors have rank {A.shape[0]}, the config gives {rank} "
            "(r and rank_pattern); correct the config or save the adapter again"
        )


def _is_pair_key(components: list[str]) -> bool:
    fqn, tail = components[:-2], components[-2:]
    # A second matrix component is an adapter name left in the key, or a nested expert key.
    return (
        bool(fqn)
        and tail[0] in MATRICES
        and tail[1] == "weight"
        and not (ADAPTER_COMPONENTS & set(fqn))
    )


def _read_safetensors(path: Path) -> dict[str, torch.Tensor]:
    try:
        return load_file(path, device="cpu")
    except (SafetensorError, OSError, ValueError, KeyError) as error:
        what = "is empty" if path.is_file() and path.stat().st_size == 0 else "cannot be read"
        raise LoraError(
            f"{path} {what}, it is damaged, truncated or too long ({error}); copy it again"
        ) from error


def _read_pickle(path: Path) -> dict[str, torch.Tensor]:
    try:
        loaded = torch.load(path, map_location="cpu", weights_only=True)
    except DAMAGED_PICKLE as error:
        raise LoraError(
            f"{path} cannot be read with weights_only=True: it is damaged or holds more than "
            f"tensors, which could run code. Save the adapter as {WEIGHTS_FILE}"
        ) from error
    tensors_only = isinstance(loaded, dict) and all(
        isinstance(key, str) and isinstance(value, torch.Tensor) for key, value in loaded.items()
    )
    if not tensors_only:
        raise LoraError(
            f"{path} must be a dict of tensors (weights_only); save the adapter as {WEIGHTS_FILE}"
        )
    return dict(loaded)

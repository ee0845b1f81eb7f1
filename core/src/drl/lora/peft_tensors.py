"""Tensors of a PEFT directory: reading the file, telling its keys apart, checking them (lora.md 3.2).

A state has the keys of ``drl.lora.state``: those of the file without ``base_model.model.``.
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
from drl.lora.errors import AdapterNotFound, LoraError, name_list, shown
from drl.lora.matching import ends_saved, is_in_saved
from drl.lora.naming import EMBEDDING_MATRICES, MATRICES, PEFT_PREFIX, adapter_key
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
ADAPTER_COMPONENTS = frozenset({*MATRICES, *EMBEDDING_MATRICES, "lora_magnitude_vector"})


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


def state_of_file(
    tensors: Mapping[str, torch.Tensor], config: LoraConfig
) -> dict[str, torch.Tensor]:
    """Turn file keys into state keys.

    Adapter tensors must be spelled ``base_model.model.<fqn>.lora_A.weight`` (or B, or
    ``lora_embedding_A``), trained biases and saved modules ``base_model.model.<their plain name>``;
    any other spelling raises ``LoraError``. Keys that are nothing of this are skipped with a
    warning.
    """
    state: dict[str, torch.Tensor] = {}
    strays, refused = [], []
    for key, tensor in tensors.items():
        plain = key.removeprefix(PEFT_PREFIX)
        kind = kind_of_key(plain, config)
        if kind == "stray":
            strays.append(key)
        elif kind == "unknown" or plain == key:
            refused.append(key)
        else:
            state[plain] = tensor
    if refused:
        raise LoraError(
            f"unexpected adapter keys: {name_list(sorted(refused))}; expected "
            f"{PEFT_PREFIX}<module path>.lora_A.weight or .lora_B.weight without an adapter name. "
            "Keys of DoRA, lora_bias or experts are not supported"
        )
    if strays:
        warnings.warn(f"no adapter tensors, ignored: {name_list(sorted(strays))}", stacklevel=4)
    return _with_present_bias_keys(state, config)


def kind_of_key(plain: str, config: LoraConfig) -> str:
    """Return what a key without prefix is: "saved", "matrix", "bias", "stray", or "unknown".

    "unknown" is an adapter tensor of a variant that is not supported, or of a damaged file. What
    lies in a saved module is no adapter tensor, whatever it is called.
    """
    components = plain.split(".")
    paths = [".".join(components[:at]) for at in range(1, len(components))]
    saved = next((path for path in paths if is_in_saved(config.modules_to_save, path)), None)
    named_as_matrix = saved is not None and saved.rpartition(".")[2] in ADAPTER_COMPONENTS
    if saved is not None and not (named_as_matrix and _is_matrix_key(components)):
        inner = components[saved.count(".") + 1]
        # older PEFT writes both copies of a saved module whose name contains "lora_"
        return "stray" if inner in ("original_module", "modules_to_save") else "saved"
    if ADAPTER_COMPONENTS & set(components):
        return "matrix" if _is_matrix_key(components) else "unknown"
    if config.bias != "none" and components[-1] == "bias" and len(components) > 1:
        return "bias"
    saved_as_text = any(ends_saved(config.modules_to_save, path) for path in paths)
    return "saved" if saved_as_text else "stray"


def check_tensors(state: Mapping[str, torch.Tensor], config: LoraConfig) -> tuple[str, ...]:
    """Return the adapted module paths in the state's order; raise ``LoraError`` if it is unsound.

    Each module needs a pair of finite floating matrices whose rank is the one of ``config``; every
    entry of ``modules_to_save`` needs tensors; nothing else may be there but trained biases.
    """
    kinds = {key: kind_of_key(key, config) for key in state}
    matrices = {key: state[key] for key, kind in kinds.items() if kind == "matrix"}
    unexpected = sorted(key for key, kind in kinds.items() if kind in ("unknown", "stray"))
    if unexpected:
        raise LoraError(
            f"unexpected adapter keys: {name_list(unexpected)}; a key ends in lora_A.weight or "
            "lora_B.weight, or belongs to bias or modules_to_save of the config"
        )
    fqns = check_pairs(matrices, config)
    for key, kind in kinds.items():
        if kind in ("saved", "bias"):
            check_values(key, state[key], may_count=kind == "saved")
    for entry in config.modules_to_save:
        if not any(kind == "saved" and _names_saved(entry, key) for key, kind in kinds.items()):
            raise LoraError(
                f"missing keys: modules_to_save names {shown(entry)}, but there is no tensor of such a "
                "module; save the adapter again, or take the entry out"
            )
    return fqns


def check_pairs(matrices: Mapping[str, torch.Tensor], config: LoraConfig) -> tuple[str, ...]:
    """Return the paths of the pairs; raise ``LoraError`` for one that is incomplete or unsound."""
    pairs = {_path_of(key): _pair_of(key) for key in matrices}
    keys = [adapter_key(fqn, matrix) for fqn, pair in pairs.items() for matrix in pair]
    missing = [key for key in keys if key not in matrices]
    if missing:
        raise LoraError(f"missing adapter keys: {name_list(missing)}; a pair is lora_A and lora_B")
    unexpected = sorted(set(matrices) - set(keys))
    if unexpected:
        raise LoraError(
            f"unexpected adapter keys: {name_list(unexpected)}; a layer has either lora_A and "
            "lora_B or lora_embedding_A and lora_embedding_B"
        )
    if not pairs:
        raise LoraError(
            "all lora keys are missing: there is no adapter tensor; expected pairs "
            f"{PEFT_PREFIX}<module path>.lora_A.weight and .lora_B.weight"
        )
    for fqn, pair in pairs.items():
        A, B = (matrices[adapter_key(fqn, matrix)] for matrix in pair)
        _check_pair(fqn, pair, A, B, config.rank_of(fqn))
    return tuple(pairs)


def _check_pair(
    fqn: str, pair: tuple[str, str], A: torch.Tensor, B: torch.Tensor, rank: int
) -> None:
    for matrix, tensor in zip(pair, (A, B), strict=True):
        most = 2 if pair == EMBEDDING_MATRICES else 5
        mixes = tensor is A or all(size == 1 for size in tensor.shape[2:])
        if not 2 <= tensor.dim() <= most or tensor.dim() != A.dim() or not mixes:
            raise LoraError(
                f"{adapter_key(fqn, matrix)} has shape {list(tensor.shape)}; A must be [rank, in] "
                "and B [out, rank], both with kernel dimensions behind for a convolution, which "
                "are 1 in B (stacked experts are not supported)"
            )
        check_values(adapter_key(fqn, matrix), tensor)
    if A.shape[0] != B.shape[1]:
        raise LoraError(
            f"the ranks of A and B differ at {fqn}: {pair[0]} {list(A.shape)}, {pair[1]} "
            f"{list(B.shape)}; shapes must be [rank, in] and [out, rank]"
        )
    if A.shape[0] != rank:
        raise LoraError(
            f"rank mismatch at {fqn}: the tensors have rank {A.shape[0]}, the config gives {rank} "
            "(r and rank_pattern); correct the config or save the adapter again"
        )


def _with_present_bias_keys(
    state: dict[str, torch.Tensor], config: LoraConfig
) -> dict[str, torch.Tensor]:
    """Spell the biases of adapted layers as today's PEFT does; older ones lack ``base_layer``."""
    adapted = {_path_of(key) for key in state if kind_of_key(key, config) == "matrix"}
    old = {f"{fqn}.bias": f"{fqn}.base_layer.bias" for fqn in adapted}
    return {old.get(key, key): tensor for key, tensor in state.items()}


def _is_matrix_key(components: list[str]) -> bool:
    fqn, tail = components[:-2], components[-2:]
    if components[-1] in EMBEDDING_MATRICES:
        fqn, tail = components[:-1], components[-1:]
    # A second matrix component is an adapter name left in the key, or a nested expert key.
    ends_well = tail[0] in EMBEDDING_MATRICES or (tail[0] in MATRICES and tail[-1] == "weight")
    return bool(fqn) and ends_well and not (ADAPTER_COMPONENTS & set(fqn))


def _path_of(key: str) -> str:
    return key.rsplit(".", 1 if key.endswith(EMBEDDING_MATRICES) else 2)[0]


def _pair_of(key: str) -> tuple[str, str]:
    return EMBEDDING_MATRICES if key.endswith(EMBEDDING_MATRICES) else MATRICES


def _names_saved(entry: str, key: str) -> bool:
    components = key.split(".")
    return any(ends_saved((entry,), ".".join(components[:at])) for at in range(1, len(components)))


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

"""Adapter tensors of a live model: listing, copying out, strict loading.

Keys of a state are ``<plain fqn>.lora_A.weight`` [rank, in] and ``<plain fqn>.lora_B.weight``
[out, rank]: the keys of a PEFT file without its ``base_model.model.`` prefix.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import nn

from drl.lora.errors import LoraError, name_list
from drl.lora.inject import lora_layers
from drl.lora.naming import adapter_key
from drl.lora.sharding import copy_into, full_tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class AdapterTensors:
    """One layer's live parameters A [rank, in] and B [out, rank] (sharded under FSDP2)."""

    A: torch.Tensor
    B: torch.Tensor
    scale: float
    rank: int
    alpha: float


def adapters(module: nn.Module) -> dict[str, AdapterTensors]:
    """Return the adapters by plain path of the wrapped layer, in registration order."""
    return {
        fqn: AdapterTensors(
            A=layer.down, B=layer.up, scale=layer.scale, rank=layer.rank, alpha=layer.alpha
        )
        for fqn, layer in lora_layers(module).items()
    }


def adapter_state(module: nn.Module) -> dict[str, torch.Tensor]:
    """Return all adapter tensors, whole and detached.

    Like ``state_dict``, plain tensors share memory with the model; clone them to keep a snapshot.
    Sharded ones are gathered, so under FSDP2 every rank must call this.
    """
    return {key: full_tensor(parameter) for key, parameter in _parameters(module).items()}


def load_adapter_state(module: nn.Module, state: Mapping[str, torch.Tensor]) -> None:
    """Copy ``state`` into the module's adapters, casting to their dtype and device.

    Strict: raises ``LoraError`` that names missing and unexpected keys, wrong shapes, non-floating
    dtypes and non-finite values, all before the first tensor is written. Under sharding every rank
    passes the same whole tensors.
    """
    parameters = _parameters(module)
    unready = [key for key, parameter in parameters.items() if parameter.is_meta]
    if unready:
        raise LoraError(
            f"adapters on the meta device cannot be loaded: {name_list(unready)}; give them "
            "storage first (module.to_empty(device=...))"
        )
    check_state({key: p.shape for key, p in parameters.items()}, state)
    for key, parameter in parameters.items():
        copy_into(parameter, state[key])


def check_state(shapes: Mapping[str, torch.Size], state: Mapping[str, torch.Tensor]) -> None:
    """Raise ``LoraError`` unless ``state`` has exactly these keys and shapes, finite floats."""
    missing = [key for key in shapes if key not in state]
    unexpected = [key for key in state if key not in shapes]
    if missing or unexpected:
        parts = [f"missing keys: {name_list(missing)}"] if missing else []
        parts += [f"unexpected keys: {name_list(unexpected)}"] if unexpected else []
        raise LoraError(
            f"the adapter state does not fit the model: {'; '.join(parts)}. Every adapted layer "
            "needs its lora_A and lora_B and nothing else may be there; use the target_modules "
            "that the adapter was trained with"
        )
    for key, shape in shapes.items():
        if state[key].shape != shape:
            raise LoraError(
                f"shape mismatch at {key}: the state has {list(state[key].shape)}, the model needs "
                f"{list(shape)} (A is [rank, in], B is [out, rank])"
            )
        check_values(key, state[key])


def check_values(key: str, tensor: torch.Tensor) -> None:
    """Raise ``LoraError`` for a tensor that is not floating, has no data, or is not finite."""
    if not tensor.dtype.is_floating_point:
        raise LoraError(
            f"{key} has dtype {tensor.dtype}, not a floating dtype; adapters must be stored as "
            "float32, bfloat16 or float16"
        )
    if tensor.is_meta:
        raise LoraError(f"{key} is on the meta device and has no values; initialise it first")
    if not torch.isfinite(tensor.detach().float()).all():
        raise LoraError(
            f"non-finite adapter tensor {key}: it holds NaN or inf; use an adapter saved before "
            "training diverged"
        )


def _parameters(module: nn.Module) -> dict[str, nn.Parameter]:
    layers = lora_layers(module)
    if not layers:
        raise LoraError("the module has no adapters; call inject or load_peft first")
    pairs = [
        (adapter_key(fqn, matrix), parameter)
        for fqn, layer in layers.items()
        for matrix, parameter in (("lora_A", layer.down), ("lora_B", layer.up))
    ]
    return dict(pairs)

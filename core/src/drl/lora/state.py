"""Adapter tensors of a live model: listing, copying out, strict loading.

Keys of a state are those of a PEFT file without its ``base_model.model.`` prefix:
``<fqn>.lora_A.weight`` [rank, in] and ``<fqn>.lora_B.weight`` [out, rank] (convolutions have the
kernel behind), ``<fqn>.lora_embedding_A`` [rank, rows] and ``<fqn>.lora_embedding_B``
[features, rank], ``<fqn>.base_layer.bias`` or ``<fqn>.bias`` for trained biases of adapted and of
other layers, and plain names for the tensors of ``modules_to_save``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import nn

from drl.lora.errors import LoraError, name_list
from drl.lora.layer import DEFAULT, LoraLayer, LoraLinear
from drl.lora.naming import adapter_key
from drl.lora.sharding import copy_into, full_tensor
from drl.lora.switches import SavedModule
from drl.lora.switching import check_unmerged
from drl.lora.tree import hosts, hosts_of, lora_layers


@dataclass(frozen=True, slots=True, kw_only=True)
class AdapterTensors:
    """One layer's live parameters A [rank, in] and B [out, rank] (sharded under FSDP2)."""

    A: torch.Tensor
    B: torch.Tensor
    scale: float
    rank: int
    alpha: float


def adapters(module: nn.Module, name: str = DEFAULT) -> dict[str, AdapterTensors]:
    """Return an adapter's matrices by plain path of the layer, in registration order."""
    found: dict[str, AdapterTensors] = {}
    for fqn, layer in lora_layers(module).items():
        if name in layer.settings:
            A, B = layer.factors(name)
            s = layer.settings[name]
            found[fqn] = AdapterTensors(A=A, B=B, scale=s.scale, rank=s.rank, alpha=s.alpha)
    return found


def adapter_state(module: nn.Module, name: str = DEFAULT) -> dict[str, torch.Tensor]:
    """Return all tensors of an adapter, whole and detached.

    Like ``state_dict``, plain tensors share memory with the model; clone them to keep a snapshot.
    Sharded ones are gathered, so under FSDP2 every rank must call this.
    """
    return {key: full_tensor(tensor) for key, tensor in live_tensors(module, name).items()}


def load_adapter_state(
    module: nn.Module, state: Mapping[str, torch.Tensor], name: str = DEFAULT
) -> None:
    """Copy ``state`` into one of the module's adapters, casting to its dtypes and device.

    Strict: raises ``LoraError`` that names missing and unexpected keys, wrong shapes, non-floating
    dtypes and non-finite values, all before the first tensor is written. Under sharding every rank
    passes the same whole tensors.
    """
    live = live_tensors(module, name)
    unready = [key for key, tensor in live.items() if tensor.is_meta]
    if unready:
        raise LoraError(
            f"adapters on the meta device cannot be loaded: {name_list(unready)}; give them "
            "storage first (module.to_empty(device=...))"
        )
    check_unmerged(hosts(module))
    check_state(live, state)
    for key, tensor in live.items():
        copy_into(tensor, state[key])


def check_state(live: Mapping[str, torch.Tensor], state: Mapping[str, torch.Tensor]) -> None:
    """Raise ``LoraError`` unless ``state`` has the keys and shapes of ``live``, and finite floats.

    ``live`` may be on the meta device. An adapter is there as a whole or not at all: a state with
    some of its keys is an error.
    """
    missing = [key for key in live if key not in state]
    unexpected = [key for key in state if key not in live]
    if missing or unexpected:
        parts = [f"missing keys: {name_list(missing)}"] if missing else []
        parts += [f"unexpected keys: {name_list(unexpected)}"] if unexpected else []
        whole = "" if len(missing) == len(live) or not missing else ", only partially there"
        raise LoraError(
            f"the adapter state does not fit the model{whole}: {'; '.join(parts)}. Every adapted "
            "layer needs its two matrices, and nothing else may be there; use the target_modules, "
            "bias and modules_to_save that the adapter was trained with"
        )
    for key, tensor in live.items():
        if state[key].shape != tensor.shape:
            raise LoraError(
                f"shape mismatch at {key}: the state has {list(state[key].shape)}, the model needs "
                f"{list(tensor.shape)} (A is [rank, in], B is [out, rank])"
            )
        check_values(key, state[key], may_count=not tensor.dtype.is_floating_point)


def check_values(key: str, tensor: torch.Tensor, *, may_count: bool = False) -> None:
    """Raise ``LoraError`` for a tensor that is not floating, has no data, or is not finite.

    ``may_count``: an integer tensor is fine, as a counter of a saved module is.
    """
    if tensor.is_meta:
        raise LoraError(f"{key} is on the meta device and has no values; initialise it first")
    if not tensor.dtype.is_floating_point:
        if may_count and not tensor.dtype.is_complex:
            return
        raise LoraError(
            f"{key} has dtype {tensor.dtype}, not a floating dtype; adapters must be stored as "
            "float32, bfloat16 or float16"
        )
    if not torch.isfinite(tensor.detach().float()).all():
        raise LoraError(
            f"non-finite adapter tensor {key}: it holds NaN or inf; use an adapter saved before "
            "training diverged"
        )


def live_tensors(module: nn.Module, name: str = DEFAULT) -> dict[str, torch.Tensor]:
    """Return one adapter's own tensors by state key, in registration order."""
    found: dict[str, torch.Tensor] = {}
    for fqn, host in hosts_of(module, name):
        if isinstance(host, SavedModule):
            copies = host.modules_to_save[name].state_dict(keep_vars=True)
            found |= {f"{fqn}.{key}": tensor for key, tensor in copies.items()}
            continue
        is_layer = isinstance(host, LoraLayer)
        if isinstance(host, LoraLayer) and name in host.settings:
            for matrix, factor in zip(host.matrices, host.factors(name), strict=True):
                found[adapter_key(fqn, matrix)] = factor
        if name in host.lora_bias:
            found[f"{fqn}.base_layer.bias" if is_layer else f"{fqn}.bias"] = host.lora_bias[name]
    return found


def uniform_adapters(module: nn.Module) -> bool:
    """Say whether an engine that merges ``alpha / rank * B A`` with one rank and alpha can serve this."""
    return uniform_rank_alpha(module) is not None


def uniform_rank_alpha(module: nn.Module) -> tuple[int, float] | None:
    """Return rank and alpha of the adapter called "default", None unless they tell all of it.

    None also without it, while another one is active, and with whatever an engine that merges
    ``alpha / rank * B A`` does not know: layers that are no Linear, rank or alpha patterns, rsLoRA, biases,
    saved modules, and the start values of ``pissa`` and ``olora``.
    """
    kinds = set()
    for _, host in hosts(module):
        if any(active != DEFAULT for active in host.active):
            return None
        if DEFAULT not in host.names:
            continue
        if not isinstance(host, LoraLinear) or DEFAULT in {*host.lora_bias, *host.lora_start}:
            return None
        settings = host.settings[DEFAULT]
        kinds.add((settings.rank, settings.alpha, settings.scale))
    if len(kinds) != 1:
        return None
    ((rank, alpha, scale),) = kinds
    return (rank, alpha) if scale == alpha / rank else None

"""Frozen weights that an engine in the trainer's process may compute with, instead of a copy."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

import torch
from torch.distributed.tensor import DTensor

from drl.lora import to_plain_name
from drl.lora.naming import BASE_COMPONENTS
from drl.lora.tree import hosts

if TYPE_CHECKING:
    from torch import Tensor, nn


def shared_tensors(model: nn.Module, device: str) -> dict[str, Tensor]:
    """Return every parameter and buffer of the base by plain name, detached, on the storage of the model.

    Adapters, trained biases and trained copies of modules are left out. Tied weights come under each of
    their names. Empty when one of them cannot be shared: see ``unshareable``.
    """
    if unshareable(model, device) is not None:
        return {}
    return {name: tensor.detach() for name, tensor in base_tensors(model)}


def unshareable(model: nn.Module, device: str) -> str | None:
    """Say why the base of a model cannot be shared with an engine on ``device``, None when it can."""
    wanted = torch.device(device)
    if not hosts(model):
        return "it has no adapters: all of its weights may change"
    for name, tensor in base_tensors(model):
        if isinstance(tensor, DTensor):
            return "its weights are sharded over the ranks (train.shard_frozen)"
        if tensor.requires_grad:
            return f"{name} is trained"
        elsewhere = tensor.device.type != wanted.type or (
            wanted.index is not None and tensor.device.index != wanted.index
        )
        if elsewhere:
            return f"{name} is on {tensor.device}, the engine on {device}"
    return None


def base_tensors(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield plain name and tensor of all that is not part of an adapter."""
    own = {id(tensor) for tensor in adapter_tensors(model)}
    for name, tensor in tensors_by_name(model).items():
        if id(tensor) not in own:
            yield to_plain_name(name), tensor


def adapter_tensors(model: nn.Module) -> Iterator[Tensor]:
    """Yield what adapters put beside the base: matrices, start values, biases, copies of modules."""
    for _, host in hosts(model):
        for child, part in host.named_children():
            if child not in BASE_COMPONENTS:
                yield from tensors_by_name(part).values()


def tensors_by_name(module: nn.Module) -> Mapping[str, Tensor]:
    """Return parameters and all buffers, tied ones under each name, those outside the state dict too."""
    return {
        **dict(module.named_parameters(remove_duplicate=False)),
        **dict(module.named_buffers(remove_duplicate=False)),
    }

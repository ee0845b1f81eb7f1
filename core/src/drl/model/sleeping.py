"""A trainer's sleep: its tensors wait on the CPU while others have the device."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from drl.lora import adapter_names
from drl.model.moving import move, release_cached
from drl.model.shared import adapter_tensors, tensors_by_name

if TYPE_CHECKING:
    from torch import nn

    from drl.model.ema import Ema


class Bed:
    """Where a trainer sleeps: what was moved away, and from where.

    Parameter objects and optimizer stay the same objects, so a save during sleep finds everything. Plain
    tensors keep what they share. The frozen base stays on the device where an engine computes with it.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.plain: list[Tensor] = []
        self.sharded: list[nn.Module] = []
        self.occupied = False

    def lie_down(
        self,
        models: Mapping[str, nn.Module],
        optimizer: torch.optim.Optimizer,
        averages: Iterable[Ema],
        *,
        frozen: bool,
    ) -> None:
        """Move parameters, buffers, optimizer state and averages to the CPU; gradients are dropped.

        ``frozen``: the base beside adapters too. Nothing has moved when this fails for plain tensors.
        """
        if self.occupied:
            return
        optimizer.zero_grad(set_to_none=True)
        sharded = [model for model in models.values() if is_sharded(model)]
        whole = [model for model in models.values() if not is_sharded(model)]
        plain = [tensor for model in whole for tensor in sleepers(model, frozen=frozen)]
        plain += (tensor for tensor in optimizer_tensors(optimizer) if self._is_here(tensor))
        plain += (
            shadow
            for average in averages
            for shadow in average.state().values()
            if not isinstance(shadow, DTensor)
        )
        move(plain, "cpu")
        for model in sharded:
            model.to("cpu")
        self.plain, self.sharded, self.occupied = plain, sharded, True
        self._follow(optimizer, averages, torch.device("cpu"))
        release_cached(self.device)

    def get_up(self, optimizer: torch.optim.Optimizer, averages: Iterable[Ema]) -> None:
        """Move everything back."""
        if not self.occupied:
            return
        move(self.plain, self.device)
        for model in self.sharded:
            model.to(self.device)
        self._follow(optimizer, averages, self.device)
        self.plain, self.sharded, self.occupied = [], [], False

    def _is_here(self, tensor: Tensor) -> bool:
        # Adam counts its steps on the CPU unless it is fused
        return tensor.device.type == self.device.type and not isinstance(tensor, DTensor)

    def _follow(
        self, optimizer: torch.optim.Optimizer, averages: Iterable[Ema], device: torch.device
    ) -> None:
        """Take sharded state to where its parameters are."""
        for state in optimizer.state.values():
            for key, value in state.items():
                if isinstance(value, DTensor):
                    state[key] = value.to(device)
        for average in averages:
            average.follow()


def sleepers(model: nn.Module, *, frozen: bool) -> Iterator[Tensor]:
    """Yield the tensors of a plain model that go to sleep, each once."""
    everything = frozen or not adapter_names(model)
    found = tensors_by_name(model).values() if everything else adapter_tensors(model)
    yield from {id(tensor): tensor for tensor in found}.values()


def optimizer_tensors(optimizer: torch.optim.Optimizer) -> Iterator[Tensor]:
    """Yield the tensors of an optimizer's state."""
    for state in optimizer.state.values():
        yield from (value for value in state.values() if isinstance(value, Tensor))


def is_sharded(model: nn.Module) -> bool:
    """Say whether FSDP2 manages a part of the model."""
    return any(isinstance(part, FSDPModule) for part in model.modules())

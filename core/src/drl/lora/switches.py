"""Modules whose weights an adapter replaces: trained copies of whole modules, and of biases.

Both let the wrapped module's attributes through, because models read them (``norm.weight``,
``embed.linear_1``).
"""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import nn
from torch.func import functional_call

from drl.lora.layer import LoraLayer, bias_owner


class SavedModule(nn.Module):
    """A frozen module and one trained copy per adapter that lists it in ``modules_to_save``."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.original_module = module
        self.modules_to_save = nn.ModuleDict()
        self.active: tuple[str, ...] = ()

    @property
    def names(self) -> tuple[str, ...]:
        """The adapters that have a copy."""
        return tuple(self.modules_to_save)

    @property
    def current(self) -> nn.Module:
        """The module in use: the active adapter's copy, or the original."""
        copies = self.modules_to_save
        owner = next((name for name in self.active if name in copies), None)
        return self.original_module if owner is None else copies[owner]

    def add(self, name: str, plain: nn.Module) -> None:
        """Add a copy of the module as it was without adapters; a meta copy has no values yet."""
        self.modules_to_save[name] = copy.deepcopy(plain)

    def remove(self, name: str) -> None:
        """Forget an adapter's copy."""
        if name in self.modules_to_save:
            del self.modules_to_save[name]
        self.active = tuple(kept for kept in self.active if kept != name)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Call the module in use; its signature is the caller's affair."""
        return self.current(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        """Return what the wrapper lacks from the module in use."""
        try:
            return super().__getattr__(name)
        except AttributeError:
            if name in ("original_module", "modules_to_save", "active"):
                raise  # not built yet: unpickling
            return getattr(self.current, name)


class BiasSwitch(nn.Module):
    """A frozen module that is no LoRA layer, and one trained bias per adapter with ``bias`` "all"."""

    def __init__(self, base_layer: nn.Module) -> None:
        super().__init__()
        self.base_layer = base_layer
        self.lora_bias = nn.ParameterDict()
        self.active: tuple[str, ...] = ()

    @property
    def names(self) -> tuple[str, ...]:
        """The adapters that have a bias."""
        return tuple(self.lora_bias)

    @property
    def bias(self) -> torch.Tensor:
        """The bias in use."""
        owner = bias_owner(self.active, self.lora_bias)
        return self.base_layer.bias if owner is None else self.lora_bias[owner]  # type: ignore[return-value]

    def remove(self, name: str) -> None:
        """Forget an adapter's bias."""
        if name in self.lora_bias:
            del self.lora_bias[name]
        self.active = tuple(kept for kept in self.active if kept != name)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Call the module with the bias in use."""
        owner = bias_owner(self.active, self.lora_bias)
        if owner is None:
            return self.base_layer(*args, **kwargs)
        bias = self.lora_bias[owner].to(self.base_layer.bias.dtype)  # type: ignore[union-attr, arg-type]
        return functional_call(self.base_layer, {"bias": bias}, args, kwargs)

    def __getattr__(self, name: str) -> Any:
        """Return what the wrapper lacks from the wrapped module."""
        try:
            return super().__getattr__(name)
        except AttributeError:
            if name in ("base_layer", "lora_bias", "active"):
                raise  # not built yet: unpickling
            return getattr(self.base_layer, name)


Host = LoraLayer | SavedModule | BiasSwitch
"""Whatever holds tensors of adapters in a model."""

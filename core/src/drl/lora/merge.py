"""Base plus adapter as one weight, with a single rounding (lora.md 2.4).

PEFT rounds the delta to bf16, then adds in bf16. Here product, scale and sum are float32 and only
the result is rounded. Merging always starts from the untouched base and never writes to the model:
adding and subtracting in low precision drifts over many weight pushes.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn

from drl.lora.errors import LoraError
from drl.lora.inject import lora_layers
from drl.lora.layer import LoraLinear
from drl.lora.naming import to_plain_name
from drl.lora.sharding import full_tensor


def merge_delta(W: torch.Tensor, A: torch.Tensor, B: torch.Tensor, scale: float) -> torch.Tensor:
    """Return ``W + scale * B A`` [out, in] in W's dtype, computed in float32 and rounded once.

    W [out, in], A [rank, in], B [out, rank], any floating dtypes, on one device. A new tensor; the
    arguments are left alone. Autocast and TF32 are off inside, as both would round the product.
    """
    with torch.autocast(W.device.type, enabled=False), _exact_float32():
        delta = B.float() @ A.float()
        return delta.mul_(scale).add_(W.float()).to(W.dtype)


def merged_state(module: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield name and tensor of every parameter and buffer of the model with adapters merged in.

    Names and order are those of the model's ``state_dict`` before ``inject``. Only one merged
    weight is alive at a time, if the caller drops it; tensors without adapter share memory with
    the model. Sharded tensors are gathered one by one, so under FSDP2 every rank must drain this
    in step. Raises ``LoraError`` for a target weight that another module uses too: after merging
    the two would differ.
    """
    layers = lora_layers(module)
    _check_untied(module, layers)
    merged = {f"{fqn}.weight": layer for fqn, layer in layers.items()}
    for key, tensor in module.state_dict().items():
        if _is_adapter_tensor(key, layers):
            continue
        name = to_plain_name(key)
        layer = merged.get(name)
        yield name, full_tensor(tensor) if layer is None else _merge_layer(layer)


@torch.no_grad()
def _merge_layer(layer: LoraLinear) -> torch.Tensor:
    W = full_tensor(layer.base_layer.weight)
    return merge_delta(W, full_tensor(layer.down), full_tensor(layer.up), layer.scale)


def _is_adapter_tensor(key: str, layers: dict[str, LoraLinear]) -> bool:
    components = to_plain_name(key).split(".")
    owner = ".".join(components[:-3])  # <fqn>.lora_A.<adapter>.weight
    return owner in layers and components[-3] in ("lora_A", "lora_B")


def _check_untied(module: nn.Module, layers: dict[str, LoraLinear]) -> None:
    targets = {id(layer.base_layer.weight): f"{fqn}.weight" for fqn, layer in layers.items()}
    for key, parameter in module.named_parameters(remove_duplicate=False):
        name = to_plain_name(key)
        target = targets.get(id(parameter), name)
        if name != target:
            raise LoraError(
                f"{target} is tied to {name}; merging an adapter into one of them would break the "
                "tie. Give the adapted layer its own copy of the weight, or do not target it"
            )


@contextmanager
def _exact_float32() -> Iterator[None]:
    # Per backend: the global getter fails once a user has set only one backend.
    backends = (torch.backends.cuda.matmul, torch.backends.mkldnn.matmul)  # type: ignore[attr-defined]
    before = [backend.fp32_precision for backend in backends]
    try:
        for backend in backends:
            backend.fp32_precision = "ieee"
        yield
    finally:
        for backend, precision in zip(backends, before, strict=True):
            backend.fp32_precision = precision

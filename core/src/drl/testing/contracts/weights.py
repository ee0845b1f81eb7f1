"""Buckets and weights for the contracts of engines and updaters."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from drl.interfaces.engine import LocalTensors, LoraFields, WeightBucket
from drl.mathematics.checksum import tensors_digest


def make_bucket(
    tensors: Mapping[str, Tensor],
    *,
    version: int,
    component: str = "transformer",
    index: int = 0,
    lora: LoraFields | None = None,
) -> WeightBucket:
    """Return a bucket of these tensors: "lora_merge" when ``lora`` is given, else "dense"."""
    return WeightBucket(
        component=component,
        version=version,
        index=index,
        payload="dense" if lora is None else "lora_merge",
        names=tuple(tensors),
        shapes=tuple(tuple(tensor.shape) for tensor in tensors.values()),
        dtypes=tuple(str(tensor.dtype).removeprefix("torch.") for tensor in tensors.values()),
        checksum=tensors_digest(tensors, tensors.values()),
        carrier=LocalTensors(tensors=tuple(tensors.values())),
        lora=lora,
    )


def shaken(model: nn.Module) -> dict[str, Tensor]:
    """Move every parameter of the model a little, and return them by name."""
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.05 * torch.randn(parameter.shape, generator=generator))
    return {name: parameter.detach().clone() for name, parameter in model.named_parameters()}


def first_linear(model: nn.Module) -> str:
    """Return the name of the model's first Linear."""
    found: str = next(name for name, part in model.named_modules() if isinstance(part, nn.Linear))
    return found


def adapter_of(model: nn.Module, layer: str, *, seed: int) -> dict[str, Tensor]:
    """Return A [2, in] and B [out, 2] of a layer, by pushed name, far from zero."""
    rows, columns = model.get_submodule(layer).get_parameter("weight").shape
    generator = torch.Generator().manual_seed(seed)
    return {
        f"{layer}.lora_A": torch.randn(2, columns, generator=generator),
        f"{layer}.lora_B": torch.randn(rows, 2, generator=generator),
    }

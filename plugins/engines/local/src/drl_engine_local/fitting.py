"""Whether what an update brings fits the engine's model; EngineError says what does not."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from drl.api import EngineError, LoraFields
from drl_engine_local.component import A, B, Component, Stage

if TYPE_CHECKING:
    from torch import Tensor


def check_dense(component: Component, arrivals: Mapping[str, Tensor], name: str) -> None:
    """Refuse tensors of another shape or kind, and all of them where the weights are the trainer's."""
    if component.shared and arrivals:
        raise EngineError(
            f"{name}: {len(arrivals)} dense tensors were pushed, but the engine computes with the trainer's "
            'own weights and never writes them; push adapters, or set rollout.local.weights = "fp32"'
        )
    refuse(
        [
            f"{key}: {kind(tensor)}, held {kind(component.tensors[key])}"
            for key, tensor in arrivals.items()
            if tensor.shape != component.tensors[key].shape
            or tensor.is_floating_point() != component.tensors[key].is_floating_point()
        ]
    )


def check_adapters(component: Component, arrivals: Mapping[str, Tensor], lora: LoraFields) -> None:
    """Refuse factors of another shape than layer and rank have, or that the model has no place for."""
    wrong = []
    for name, tensor in arrivals.items():
        layer, _, matrix = name.rpartition(".")
        weight = component.tensors[f"{layer}.weight"]
        if weight.ndim != 2:
            wrong.append(f"{name}: its layer has a weight {tuple(weight.shape)}, not a matrix")
            continue
        rows, columns = weight.shape
        expected = (lora.rank, columns) if f".{matrix}" == A else (rows, lora.rank)
        if tuple(tensor.shape) != expected or not tensor.is_floating_point():
            wrong.append(f"{name}: {kind(tensor)}, the layer needs {expected}")
        elif component.factors and name not in component.factors:
            wrong.append(f"{name}: the model applies an adapter, and this layer has no part in it")
        elif component.factors and component.lora != lora:
            wrong.append(f"{name}: {lora}, the model applies {component.lora}")
    refuse(wrong)


def refuse(wrong: list[str]) -> None:
    """Raise EngineError when anything is wrong."""
    if wrong:
        raise EngineError(
            "pushed tensors do not fit the engine's model; nothing was applied: " + "; ".join(wrong)
        )


def kind(tensor: Tensor) -> str:
    """Return shape and dtype as a person reads them."""
    return f"{tuple(tensor.shape)} {str(tensor.dtype).removeprefix('torch.')}"


def check_whole(component: Component, stage: Stage, name: str) -> None:
    """Refuse half adapters, and an adapter that leaves out a layer that carries the previous one."""
    halves = [
        f"{layer}{matrix}"
        for layer in stage.layers()
        for matrix in (A, B)
        if f"{layer}{matrix}" not in stage.adapters
    ]
    if halves:
        raise EngineError(
            f"{name}: {', '.join(halves)} never came, but the other matrix of the layer did; "
            "nothing was applied"
        )
    layers = {f"{layer}.weight" for layer in stage.layers()}
    stale = sorted(component.adapted() - layers - set(stage.dense))
    if stage.adapters and stale:
        raise EngineError(
            f"{name}: the update leaves the previous adapter in {', '.join(stale)}; nothing was "
            "applied. Push every layer of an adapter, or dense weights for these"
        )

"""Weights of the engine's models and what an update does to them.

An update is staged: buckets are checked and kept by reference, and everything is written at its end,
so that a failure leaves the old version whole. Adapters are merged into a pristine copy of their layer,
never into a merged weight: a thousand merges of nothing leave the base as it was, bit for bit.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch

from drl.api import Acknowledgement, EngineError, LoraFields, WeightBucket, WeightProof
from drl.lora import merge_delta
from drl.mathematics.checksum import tensors_digest, tensors_fingerprint
from drl_engine_local.bucket import check_bucket

if TYPE_CHECKING:
    from torch import Tensor, nn

A, B = ".lora_A", ".lora_B"
PAYLOADS = frozenset({"dense", "lora_merge"})


@dataclass
class Stage:
    """What an update has brought for one component so far."""

    dense: dict[str, Tensor] = field(default_factory=dict)
    adapters: dict[str, Tensor] = field(default_factory=dict)
    lora: dict[str, LoraFields] = field(default_factory=dict)

    def layers(self) -> list[str]:
        """Return the layers that have adapter tensors, sorted."""
        return sorted({name.rpartition(".")[0] for name in self.adapters})


@dataclass
class Component:
    """One model, its tensors by name, and the unmerged weight of every layer that carries a merge."""

    model: nn.Module
    tensors: dict[str, Tensor]
    pristine: dict[str, Tensor] = field(default_factory=dict)

    @classmethod
    def of(cls, model: nn.Module) -> Component:
        """Take the parameters and all buffers, those outside the state dict too."""
        return cls(model, {**dict(model.named_parameters()), **dict(model.named_buffers())})

    def base(self, name: str) -> Tensor:
        """Return the weight of a layer as it is without any adapter."""
        return self.pristine.get(name, self.tensors[name])

    def knows(self, name: str, payload: str) -> bool:
        """Say whether a pushed name can be written."""
        if payload == "dense":
            return name in self.tensors
        layer, _, matrix = name.rpartition(".")
        return f".{matrix}" in (A, B) and f"{layer}.weight" in self.tensors


class WeightStore:
    """The models of an engine, and the update that is being staged."""

    def __init__(self, models: Mapping[str, nn.Module]) -> None:
        self.components = {name: Component.of(model) for name, model in models.items()}
        self.stages: dict[str, Stage] = {}
        self.version = 0

    def begin(self, version: int) -> None:
        """Start an update; one that was not ended is forgotten."""
        self.stages = {}
        self.version = version

    def stage(self, bucket: WeightBucket) -> Acknowledgement:
        """Check one bucket and keep its tensors; names that the model lacks are reported."""
        component = self._component(bucket)
        known = {name for name in bucket.names if component.knows(name, bucket.payload)}
        check_bucket(bucket, self.version, PAYLOADS)
        stage = self.stages.setdefault(bucket.component, Stage())
        target = stage.dense if bucket.payload == "dense" else stage.adapters
        twice = sorted(known & set(target))
        if twice:
            raise EngineError(f"{bucket.component}: {', '.join(twice)} came twice in one update")
        given = dict(zip(bucket.names, bucket.carrier.tensors, strict=True))
        arrivals = {name: tensor for name, tensor in given.items() if name in known}
        if bucket.payload == "dense":
            _check_dense(component, arrivals)
        elif bucket.lora is not None:  # check_bucket made sure of it
            _check_adapters(component, arrivals, bucket.lora)
            stage.lora.update(dict.fromkeys(arrivals, bucket.lora))
        target.update(arrivals)
        return Acknowledgement(
            applied=tuple(name for name in bucket.names if name in known),
            unexpected=tuple(name for name in bucket.names if name not in known),
        )

    def _component(self, bucket: WeightBucket) -> Component:
        if bucket.component not in self.components:
            raise EngineError(
                f"engine 'local' has no component {bucket.component!r}; it has "
                f"{', '.join(sorted(self.components))}"
            )
        return self.components[bucket.component]

    @torch.no_grad()
    def apply(self) -> WeightProof:
        """Write everything that was staged, or nothing; return digests of what is held now."""
        for name, stage in self.stages.items():
            _check_whole(self.components[name], stage, name)
        writes = {
            name: [*_writes(self.components[name], stage)] for name, stage in self.stages.items()
        }
        for name, stage in self.stages.items():
            _write(self.components[name], stage, writes[name])
        proof = WeightProof(
            version=self.version,
            checksums={name: self._digest(name, stage) for name, stage in self.stages.items()},
            counts={
                name: len(stage.dense) + len(stage.adapters) for name, stage in self.stages.items()
            },
            model_checksums={
                name: tensors_fingerprint(component.tensors, component.tensors.values())
                for name, component in self.components.items()
            },
        )
        self.stages = {}
        return proof

    def _digest(self, name: str, stage: Stage) -> str:
        """Digest what the update brought, once each dense tensor is held in the engine's own dtype."""
        held = self.components[name]
        lost = [
            key
            for key, sent in stage.dense.items()
            if not torch.equal(held.base(key), sent.to(held.base(key)))
        ]
        if lost:
            raise EngineError(f"{name}: {', '.join(lost)} are not held as they were sent")
        brought = {**stage.dense, **stage.adapters}
        return tensors_digest(brought, brought.values())


def _check_dense(component: Component, arrivals: Mapping[str, Tensor]) -> None:
    wrong = [
        f"{name}: {_kind(tensor)}, held {_kind(component.tensors[name])}"
        for name, tensor in arrivals.items()
        if tensor.shape != component.tensors[name].shape
        or tensor.is_floating_point() != component.tensors[name].is_floating_point()
    ]
    _refuse(wrong)


def _check_adapters(component: Component, arrivals: Mapping[str, Tensor], lora: LoraFields) -> None:
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
            wrong.append(f"{name}: {_kind(tensor)}, the layer needs {expected}")
    _refuse(wrong)


def _refuse(wrong: list[str]) -> None:
    if wrong:
        raise EngineError(
            "pushed tensors do not fit the engine's model; nothing was applied: " + "; ".join(wrong)
        )


def _kind(tensor: Tensor) -> str:
    return f"{tuple(tensor.shape)} {str(tensor.dtype).removeprefix('torch.')}"


def _check_whole(component: Component, stage: Stage, name: str) -> None:
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
    stale = sorted(set(component.pristine) - layers - set(stage.dense))
    if stage.adapters and stale:
        raise EngineError(
            f"{name}: the update leaves the previous adapter in {', '.join(stale)}; nothing was "
            "applied. Push every layer of an adapter, or dense weights for these"
        )


def _writes(component: Component, stage: Stage) -> Iterator[tuple[str, Tensor]]:
    """Yield merged weights; made before anything is written, so that running out of memory is harmless."""
    for layer in stage.layers():
        name = f"{layer}.weight"
        held = component.tensors[name]
        base = stage.dense[name].to(held) if name in stage.dense else component.base(name)
        lora = stage.lora[layer + A]
        down, up = (stage.adapters[layer + matrix].to(held.device) for matrix in (A, B))
        yield name, merge_delta(base, down, up, lora.alpha / lora.rank)


def _write(component: Component, stage: Stage, merged: list[tuple[str, Tensor]]) -> None:
    for name, tensor in stage.dense.items():
        component.tensors[name].copy_(tensor)
        component.pristine.pop(name, None)
    for name, tensor in merged:
        held = component.tensors[name]
        if name not in component.pristine:
            component.pristine[name] = held.clone()
        held.copy_(tensor)

"""One model of the engine: its tensors by name, and the two ways in which it holds an adapter.

Merged: the weight of an adapted layer is base plus update, made at each sync from the untouched base, so
that a thousand merges of nothing leave the base as it was. Applied: adapter layers beside the weights, as
the trainer computes.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
from torch import nn

from drl.api import EngineError, Family, LoraFields, WeightSource
from drl.lora import LoraConfig, LoraError, adapters, inject, merge_delta, remove_adapter
from drl.lora.layer import DEFAULT

if TYPE_CHECKING:
    from torch import Tensor

A, B = ".lora_A", ".lora_B"


@dataclass
class Stage:
    """What an update has brought for one component so far; adapters as copies of the engine's own.

    ``digest``: of everything, where one bucket brought it as copies; None where it must be computed.
    """

    dense: dict[str, Tensor] = field(default_factory=dict)
    adapters: dict[str, Tensor] = field(default_factory=dict)
    lora: dict[str, LoraFields] = field(default_factory=dict)
    buckets: int = 0
    digest: str | None = None

    def layers(self) -> list[str]:
        """Return the layers that have adapter tensors, sorted."""
        return sorted({name.rpartition(".")[0] for name in self.adapters})


@dataclass
class Component:
    """A model and its tensors by plain name.

    ``shared``: the base is the trainer's memory, which is read and never written. ``applied``: adapters
    are computed beside the weights, not merged. ``pristine``: unmerged weight of each merged layer.
    ``factors``: A [rank, in] and B [out, rank] of each layer that applies an adapter, as ``layer.lora_A``, in
    ``autocast``, the dtype in which autocast multiplies, where it is on: rounded at a sync and not in each
    forward. ``lora``: their rank and alpha.
    ``rebuilt``: layers or memory are others than before, so that what was recorded for them is void.
    ``frozen``: fingerprint of the shared tensors, by how many of them are in use.
    """

    model: nn.Module
    tensors: dict[str, Tensor]
    shared: bool = False
    applied: bool = False
    autocast: torch.dtype | None = None
    pristine: dict[str, Tensor] = field(default_factory=dict)
    factors: dict[str, Tensor] = field(default_factory=dict)
    lora: LoraFields | None = None
    rebuilt: bool = False
    frozen: dict[int, str] = field(default_factory=dict)

    @classmethod
    def of(
        cls,
        model: nn.Module,
        *,
        shared: bool = False,
        applied: bool = False,
        autocast: torch.dtype | None = None,
    ) -> Component:
        """Take the parameters and all buffers, those outside the state dict too."""
        tensors = {**dict(model.named_parameters()), **dict(model.named_buffers())}
        return cls(model, tensors, shared=shared, applied=applied, autocast=autocast)

    def base(self, name: str) -> Tensor:
        """Return the weight of a layer as it is without any adapter."""
        return self.pristine.get(name, self.tensors[name])

    def knows(self, name: str, payload: str) -> bool:
        """Say whether a pushed name can be written."""
        if payload == "dense":
            return name in self.tensors
        layer, _, matrix = name.rpartition(".")
        return f".{matrix}" in (A, B) and f"{layer}.weight" in self.tensors

    def adapted(self) -> set[str]:
        """Return the names of the weights that carry an adapter now."""
        applying = {f"{name.removesuffix(A)}.weight" for name in self.factors if name.endswith(A)}
        return applying | set(self.pristine)

    def held(self) -> dict[str, Tensor]:
        """Return all that the model computes with: its tensors, and the adapters that it applies."""
        return self.tensors | self.factors

    def own(self) -> list[Tensor]:
        """Return the tensors whose memory is the engine's: all but those that it shares."""
        if self.shared:
            return [*(self.tensors[name] for name in self.pristine), *self.factors.values()]
        return [*self.tensors.values(), *self.pristine.values(), *self.factors.values()]

    def theirs(self, layers: Collection[str] = ()) -> dict[str, Tensor]:
        """Return the trainer's tensors that it computes with, once adapters of these layers are written too."""
        if not self.shared:
            return {}
        own = set(self.pristine)
        if not self.applied:
            own |= {f"{layer}.weight" for layer in layers}
        return {name: tensor for name, tensor in self.tensors.items() if name not in own}

    def prepare(self, stage: Stage) -> dict[str, Tensor]:
        """Return merged weights, or make room for applied ones; what is served does not change yet.

        Raises EngineError for applied adapters of several kinds.
        """
        if not self.applied:
            return dict(_merged(self, stage))
        if stage.adapters and not self.factors:
            self._inject(stage)
        return {}

    def write(self, stage: Stage, merged: Mapping[str, Tensor]) -> None:
        """Write a checked update, in place wherever the memory is the engine's own.

        What was compiled or recorded for these weights stays right then.
        """
        _copy([self.tensors[name] for name in stage.dense], list(stage.dense.values()))
        for name in stage.dense:
            self.pristine.pop(name, None)
        self._write_factors(stage)
        new = {name for name in merged if name not in self.pristine}
        for name in new:
            held = self.tensors[name].detach()
            self.pristine[name] = held if self.shared else held.clone()
        if self.shared:
            for name in new:
                self.tensors[name].data = merged[name]
            self.rebuilt |= bool(new)
            merged = {name: tensor for name, tensor in merged.items() if name not in new}
        _copy([self.tensors[name] for name in merged], list(merged.values()))

    def _write_factors(self, stage: Stage) -> None:
        """Copy applied adapters; dense weights of a layer end the adapter that it had."""
        if not self.applied:
            return
        ended = [name for name in self.factors if f"{name.removesuffix(B)}.weight" in stage.dense]
        for name in ended:
            self.factors[name].zero_()
        names = list(stage.adapters)
        _copy([self.factors[name] for name in names], [stage.adapters[name] for name in names])

    def _inject(self, stage: Stage) -> None:
        kinds = set(stage.lora.values())
        if len(kinds) > 1:
            raise EngineError(f"applied adapters need one rank and alpha, got {kinds}")
        (self.lora,) = kinds
        layers = tuple(stage.layers())
        config = LoraConfig(rank=self.lora.rank, alpha=self.lora.alpha, target_modules=layers)
        first = next(iter(stage.adapters.values()))
        training = self.model.training
        dtype = self.autocast or first.dtype
        try:
            inject(self.model, config, generator=torch.Generator(), dtype=dtype)
        except BaseException:
            # no room, say: layers whose adapters have no values yet would compute with anything
            with suppress(LoraError):
                remove_adapter(self.model, DEFAULT)
            raise
        self.model.requires_grad_(False).train(training)
        made = adapters(self.model)
        self.factors = {f"{layer}{A}": made[layer].A for layer in layers}
        self.factors |= {f"{layer}{B}": made[layer].B for layer in layers}
        self.rebuilt = True


def _copy(targets: Sequence[Tensor], sources: Sequence[Tensor]) -> None:
    if targets:
        torch._foreach_copy_(list(targets), list(sources))


def _merged(component: Component, stage: Stage) -> Iterator[tuple[str, Tensor]]:
    """Yield merged weights; made before anything is written, so that running out of memory is harmless."""
    for layer in stage.layers():
        name = f"{layer}.weight"
        held = component.tensors[name]
        base = stage.dense[name].to(held) if name in stage.dense else component.base(name)
        lora = stage.lora[layer + A]
        down, up = (stage.adapters[layer + matrix] for matrix in (A, B))
        yield name, merge_delta(base, down, up, lora.alpha / lora.rank)


def with_shared(
    family: Family, component: str, source: WeightSource, shared: Mapping[str, Tensor]
) -> nn.Module:
    """Return the component with the trainer's tensors as its own parameters and buffers, not copied.

    Raises EngineError, which names them, for tensors that the module has and the trainer does not, or the
    other way round, and for other shapes.
    """
    model = family.build(component, source).eval().requires_grad_(False)
    wanted = {
        **dict(model.named_parameters(remove_duplicate=False)),
        **dict(model.named_buffers(remove_duplicate=False)),
    }
    missing = sorted(wanted.keys() - shared.keys())
    strange = sorted(shared.keys() - wanted.keys())
    other = [
        f"{name}: {tuple(shared[name].shape)}, the module needs {tuple(tensor.shape)}"
        for name, tensor in wanted.items()
        if name in shared and shared[name].shape != tensor.shape
    ]
    if missing or strange or other:
        raise EngineError(
            f"{component}: the trainer's weights are not those of the engine's module, so that it cannot "
            f"compute with them: {len(missing)} missing {missing[:3]}, {len(strange)} unknown "
            f'{strange[:3]}, {len(other)} of another shape {other[:3]}; set rollout.local.weights = "fp32"'
        )
    for name, tensor in wanted.items():
        path, _, leaf = name.rpartition(".")
        mine = shared[name]
        if isinstance(tensor, nn.Parameter):
            mine = nn.Parameter(mine, requires_grad=False)
        setattr(model.get_submodule(path), leaf, mine)
    return model

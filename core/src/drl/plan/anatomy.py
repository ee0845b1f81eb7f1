"""What a recipe's model is made of, measured on the meta device: bytes by purpose, footprints by rows.

Footprints are linear in the rows of a forward, so two of them, at 1 and at 2 rows, give all others.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch
from diffusers import ModelMixin

from drl.errors import BadInput, ContractError
from drl.interfaces.family import Family, TrainPipelineConfig, WeightSource
from drl.interfaces.outline import Outline
from drl.lora import adapter_off
from drl.lora.tree import lora_layers
from drl.mathematics.checksum import FINGERPRINT_BYTES
from drl.mathematics.feeding import DTYPES, Feeding
from drl.model.attention import check_attention
from drl.model.build import adapt
from drl.model.checkpointing import chosen
from drl.model.compiled import outermost
from drl.model.precision import Overrides, check_matched, find_overrides, store_frozen
from drl.model.prepare import parameter_dtypes
from drl.plan.ledger import Footprint, checkpointed, inference_footprint, training_footprint
from drl.stages.rollout import training_sampling
from drl.types import ConditionRecord, Conditions, Context

if TYPE_CHECKING:
    from torch import Tensor, nn


class NoPlan(BadInput):
    """A recipe that runs, but that memory and work cannot be told of."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Bytes:
    """Weights of the trained components. ``adapted``: elements of the layers that carry an adapter.

    ``elements``: of all parameters without adapters. ``frozen``, ``buffers``, ``trained``: bytes as the trainer
    holds them; ``trained_elements``: what the optimizer steps. ``compared``: bytes that a fingerprint of the
    model takes at its worst moment.
    """

    elements: int
    adapted: int
    frozen: int
    buffers: int
    trained: int
    trained_elements: int
    compared: int


class Rows:
    """A footprint by rows, from those at 1 and at 2 rows; each is measured when it is asked for."""

    def __init__(self, measure: Callable[[int], Footprint]) -> None:
        self._measure = measure

    @cached_property
    def one(self) -> Footprint:
        """The footprint of one row."""
        return self._measure(1)

    @cached_property
    def two(self) -> Footprint:
        """The footprint of two rows."""
        return self._measure(2)

    def at(self, rows: int) -> Footprint:
        """Return the footprint of so many rows."""
        more = rows - 1
        if not more:
            return self.one
        return Footprint(
            peak=self.one.peak + more * (self.two.peak - self.one.peak),
            kept=self.one.kept + more * (self.two.kept - self.one.kept),
            forward_flops=rows * self.one.forward_flops,
            backward_flops=rows * self.one.backward_flops,
        )


class Anatomy:
    """The trained components of a recipe on the meta device, and the shapes of what goes through them.

    Raises NoPlan when the family gives no outline; BadInput when the checkpoint's configs cannot be read, and
    for an attention kernel or dtypes that the run would refuse.
    """

    def __init__(self, recipe: Any, family: Family, context: Context) -> None:
        self.family = family
        self.dtype: torch.dtype = DTYPES[recipe.train.forward_dtype]
        sampling = training_sampling(recipe)
        outline = family.outline(recipe.model.checkpoint, sampling)
        if outline is None:
            raise NoPlan(
                f"{type(family).__name__} gives no outline of its samples (Family.outline): memory and work "
                "of this recipe are not known"
            )
        self.outline: Outline = outline
        self.modules: dict[str, nn.Module] = {}
        self.configs: dict[str, TrainPipelineConfig] = {}
        unmatched: list[set[str]] = []
        for number, name in enumerate(recipe.model.components):
            module, config, overrides = blank(recipe, family, context, name, number)
            self.modules[name], self.configs[name] = module, config
            unmatched.append(set(overrides.unmatched))
        check_matched(self.modules, sorted(set.intersection(*unmatched)))

    @cached_property
    def bytes(self) -> Bytes:
        """Bytes of all components together."""
        modules = list(self.modules.values())
        parameters = [p for module in modules for p in module.parameters()]
        trained = [p for p in parameters if p.requires_grad]
        layers = [layer for module in modules for layer in lora_layers(module).values()]
        adapters = sum(f.numel() for layer in layers for f in layer.factors(layer.active[0]))
        return Bytes(
            elements=sum(p.numel() for p in parameters) - adapters,
            adapted=sum(layer.weight.numel() for layer in layers),
            frozen=size_of([p for p in parameters if not p.requires_grad]),
            buffers=size_of([b for module in modules for b in module.buffers()]),
            trained=size_of(trained),
            trained_elements=sum(p.numel() for p in trained),
            compared=compared([*parameters, *(b for module in modules for b in module.buffers())]),
        )

    @property
    def row_bytes(self) -> int:
        """Bytes of the float32 latents of one row, all streams."""
        return 4 * sum(_count(shape) for shape in self.outline.streams.values())

    @property
    def condition_bytes(self) -> int:
        """Bytes of one condition record."""
        return 4 * sum(_count(shape) for shape in self.outline.condition.values())

    def training(self, share: float) -> Rows:
        """Return what a micro-batch takes with this share of its blocks recomputed; the largest component's."""
        found = self._trained.get(share)
        if found is None:
            found = self._trained[share] = Rows(
                lambda rows: self._largest(lambda name: self._train(name, rows, share))
            )
        return found

    @cached_property
    def inference(self) -> Rows:
        """Return what a forward without gradient takes, adapters merged or left out."""
        return Rows(lambda rows: self._largest(lambda name: self._infer(name, rows)))

    def recorded(self, rows: int, *, applied: bool) -> int:
        """Return the bytes that a recorded forward of so many rows reserves for itself.

        ``applied``: adapters are computed beside the weights. Segments do not grow in step with the rows, so
        it is followed at these very rows.
        """
        key = rows, applied
        if key not in self._recorded:
            footprint = self._largest(lambda name: self._infer(name, rows, applied=applied))
            self._recorded[key] = footprint.reserved
        return self._recorded[key]

    @cached_property
    def _recorded(self) -> dict[tuple[int, bool], int]:
        return {}

    @cached_property
    def decoding(self) -> Footprint:
        """Return what decoding one batch takes; nothing where nothing is decoded."""
        decode = self.outline.decode
        if decode is None:
            return Footprint(peak=0)
        reordered = not self.outline.decode_compiled
        return inference_footprint(decode, torch.float32, reordered=reordered)

    @cached_property
    def _trained(self) -> dict[float, Rows]:
        return {}

    def _largest(self, measure: Callable[[str], Footprint]) -> Footprint:
        return max(map(measure, self.modules), key=lambda footprint: footprint.peak)

    def _train(self, name: str, rows: int, share: float) -> Footprint:
        module = self.modules[name].train()
        recompute(module, share, self.configs[name].wrap)
        for parameter in module.parameters():
            parameter.grad = None
        forward = self.forward(name, rows)
        footprint = training_footprint(lambda: list(forward().values()), self.dtype)
        gradients = sum(
            p.grad.numel() * p.grad.element_size()
            for p in module.parameters()
            if p.grad is not None
        )
        for parameter in module.parameters():
            parameter.grad = None
        # gradients stay for the whole window and are counted beside the optimizer's state
        return replace(footprint, peak=max(footprint.kept, footprint.peak - gradients))

    def _infer(self, name: str, rows: int, *, applied: bool = False) -> Footprint:
        module = self.modules[name].eval()
        with adapter_off(module) if lora_layers(module) and not applied else nullcontext():
            return inference_footprint(self.forward(name, rows), self.dtype)

    def forward(self, name: str, rows: int) -> Callable[[], Mapping[str, Tensor]]:
        """Return a forward of this component with so many rows, as engine and trainer run it."""
        family, outline = self.family, self.outline
        feeding = Feeding.of(self.configs[name])
        record = ConditionRecord(
            tensors={key: on_meta(shape) for key, shape in outline.condition.items()}
        )
        streams = {key: on_meta((rows, *shape)) for key, shape in outline.streams.items()}
        sigma_B, timestep_B = on_meta((rows,)), on_meta((rows,))

        def run() -> Mapping[str, Tensor]:
            condition = family.collate([family.condition(record)] * rows)
            time_B = family.model_time(sigma_B, timestep_B)
            fed, fed_B, conditions = feeding.cast(
                self.dtype, streams, time_B, Conditions(positive=condition)
            )
            return family.forward(self.modules[name], fed, fed_B, conditions.positive)

        return run


def blank(
    recipe: Any, family: Family, context: Context, name: str, number: int
) -> tuple[nn.Module, TrainPipelineConfig, Overrides]:
    """Return a component on the meta device as the trainer holds it: adapters, dtypes, what is trained.

    Raises BadInput, as the run would, for an attention kernel or dtypes that the component cannot have.
    """
    checkpoint = recipe.model.checkpoint
    config = family.pipeline_config(name, family.component_config(name, checkpoint))
    source = WeightSource(checkpoint=checkpoint, dtype=recipe.train.master_dtype, meta=True)
    module = family.build(name, source)
    real = [key for key, parameter in module.named_parameters() if not parameter.is_meta]
    if real:
        raise ContractError(
            f"{name}: Family.build must respect WeightSource.meta; {real[0]} has storage"
        )
    module.to("meta")
    check_attention(name, module, recipe.train.attention_backend)
    master = DTYPES[recipe.train.master_dtype]
    for parameter in module.parameters():
        if parameter.is_floating_point():
            parameter.data = parameter.data.to(master)
    lora = adapt(recipe, config, context, name, number, module)
    dtype = recipe.train.forward_dtype
    overrides = find_overrides(name, module, parameter_dtypes(recipe, config), dtype)
    if lora is not None:
        store_frozen(module, dtype, overrides)
    return module, config, overrides


def recompute(module: nn.Module, share: float, wrap: Sequence[str]) -> None:
    """Let this share of a diffusers model's blocks be recomputed in the backward pass; 0 turns it off.

    A model that is none of diffusers' is left as it is: the run itself refuses it.
    """
    if not isinstance(module, ModelMixin):
        return
    blocks = outermost(module, wrap)
    repeated = {id(block) for place, block in enumerate(blocks) if share and chosen(place, share)}

    def run(block: Callable[..., Any], *args: Any) -> Any:
        return checkpointed(block, *args) if id(block) in repeated else block(*args)

    module.enable_gradient_checkpointing(gradient_checkpointing_func=run)


def compared(tensors: Sequence[Tensor]) -> int:
    """Return the most bytes that a fingerprint takes.

    A piece twice, and as much again inside torch's sum along a dimension (2.11, on an H200).
    """
    return 4 * min(size_of(tensors), FINGERPRINT_BYTES)


def on_meta(shape: Sequence[int]) -> Tensor:
    """Return a float32 tensor without values."""
    return torch.empty(tuple(shape), device="meta")


def size_of(tensors: Sequence[Tensor]) -> int:
    """Return the bytes of tensors."""
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def _count(shape: Sequence[int]) -> int:
    total = 1
    for size in shape:
        total *= size
    return total

"""Build the trained components: weights, adapters, what is frozen."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any

from torch import nn

from drl.config.adapter_file import adapter_directories
from drl.errors import BadInput, ContractError
from drl.interfaces.family import Family, TrainPipelineConfig, WeightSource
from drl.lora import LoraConfig, inject, inject_peft, load_peft
from drl.model.attention import check_attention_name
from drl.model.compiled import Compilations, compile_blocks
from drl.model.materialize import ShardSettings, check_filled, spread
from drl.model.optimizers import check_dtype
from drl.model.parallel import ALONE, DTYPES, Ranks
from drl.model.precision import NONE, Overrides, check_matched
from drl.model.prepare import prepare_built, prepare_dtypes
from drl.types import Context

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, slots=True, kw_only=True)
class Component:
    """One trained component: its module, its family description, its adapter settings (if any).

    ``overrides``: parameters with a dtype of their own.
    """

    module: nn.Module
    config: TrainPipelineConfig
    lora: LoraConfig | None
    overrides: Overrides = NONE


Load = Callable[[Family, str, WeightSource], object]
"""The function of ``model.backend``."""


def build_components(
    recipe: Any,
    family: Family,
    context: Context,
    ranks: Ranks = ALONE,
    load: Load | None = None,
    compilations: Compilations | None = None,
) -> dict[str, Component]:
    """Build every component of ``model.components``, in that order; collective over the ranks.

    ``compilations``: compile their blocks, and count there.
    """
    unknown = [name for name in recipe.model.components if name not in family.components]
    if unknown:
        raise BadInput(
            f"model.components: {type(family).__name__} has no component {unknown}; "
            f"it has {list(family.components)}"
        )
    check_attention_name(recipe.train.attention_backend)
    components = {
        name: build_component(recipe, family, context, name, number, ranks, load)
        for number, name in enumerate(recipe.model.components)
    }
    check_globs(components)
    if compilations is not None:
        for component in components.values():
            compile_blocks(component.module, component.config.wrap, compilations)
    return components


def check_globs(components: Mapping[str, Component]) -> None:
    """Raise BadInput for a glob of ``train.parameter_dtypes`` that fits nothing in any component."""
    unmatched = [set(component.overrides.unmatched) for component in components.values()]
    modules = {name: component.module for name, component in components.items()}
    check_matched(modules, sorted(set.intersection(*unmatched)))


def build_component(
    recipe: Any,
    family: Family,
    context: Context,
    name: str,
    number: int,
    ranks: Ranks = ALONE,
    load: Load | None = None,
) -> Component:
    """Load masters, inject adapters or choose what is trained, shard; then let the family finish."""
    checkpoint = recipe.model.checkpoint
    config = family.pipeline_config(name, family.component_config(name, checkpoint))
    check_dtype(recipe.train.forward_dtype, config)
    settings = shard_settings(recipe)
    source = WeightSource(
        checkpoint=checkpoint,
        dtype=recipe.train.master_dtype,
        device=context.device if ranks.world == 1 else "cpu",
        meta=not settings.reads(ranks),
    )
    module = family.build(name, source) if load is None else loaded(load, family, name, source)
    prepare_built(recipe, name, module, config, context.device)
    lora = adapt(recipe, config, context, name, number, module)
    overrides = prepare_dtypes(recipe, name, module, config, adapters=lora is not None)
    if ranks.world > 1:
        spread(
            name,
            module,
            wrap=config.wrap,
            ranks=ranks,
            settings=settings,
            device=context.device,
            overrides=overrides,
        )
    family.finish(name, module)
    check_filled(name, module)
    return Component(module=module.train(), config=config, lora=lora, overrides=overrides)


def loaded(load: Load, family: Family, name: str, source: WeightSource) -> nn.Module:
    """Return the module that the function of ``model.backend`` loads; ContractError for anything else."""
    module = load(family, name, source)
    if not isinstance(module, nn.Module):
        raise ContractError(
            f"model.backend must return a torch module for {name}, got {type(module).__name__}"
        )
    return module


def shard_settings(recipe: Any) -> ShardSettings:
    """Return how weights are spread over ranks."""
    return ShardSettings(
        forward_dtype=recipe.train.forward_dtype,
        reduce_dtype=recipe.train.reduce_dtype,
        cpu_offload=recipe.train.cpu_offload,
        shard_frozen=recipe.train.shard_frozen,
        load=recipe.model.load,
    )


def adapt(
    recipe: Any,
    config: TrainPipelineConfig,
    context: Context,
    name: str,
    number: int,
    module: nn.Module,
) -> LoraConfig | None:
    """Inject adapters, or choose what is trained. A module on the meta device gets no values."""
    if not recipe.lora.enabled:
        choose_trainable(name, module, config.trainable)
        return None
    dtype = DTYPES[recipe.train.master_dtype]
    if recipe.lora.adapter_path is not None:
        return start_from_adapter(recipe, name, module, dtype)
    lora = lora_config(recipe, config)
    inject(
        module,
        lora,
        generator=context.generator("lora_init", number),
        dtype=dtype,
        trainable=recipe.lora.is_trainable,
    )
    return lora


def start_from_adapter(recipe: Any, name: str, module: nn.Module, dtype: torch.dtype) -> LoraConfig:
    """Inject the adapter of ``lora.adapter_path``; a module on the meta device gets no values."""
    options = recipe.lora
    directories = adapter_directories(options.adapter_path, recipe.model.components)
    load = inject_peft if any(p.is_meta for p in module.parameters()) else load_peft
    return load(module, directories[name], dtype=dtype, trainable=options.is_trainable)


def lora_config(recipe: Any, config: TrainPipelineConfig) -> LoraConfig:
    """Return the adapter settings of the recipe; targets default to the family's."""
    options = recipe.lora
    targets = {"target_modules": options.target_modules, "lora_modules": options.lora_modules}
    if all(value is None for value in targets.values()):
        targets["target_modules"] = config.lora_targets
    return LoraConfig.from_fields(
        {
            **targets,
            "rank": options.rank,
            "r": options.r,
            "alpha": options.alpha,
            "lora_alpha": options.lora_alpha,
            "exclude_modules": options.exclude_modules,
            "rank_pattern": dict(options.rank_pattern),
            "alpha_pattern": dict(options.alpha_pattern),
            "layers_to_transform": options.layers_to_transform,
            "layers_pattern": options.layers_pattern,
            "use_rslora": options.use_rslora,
            "dropout": options.dropout,
            "bias": options.bias,
            "modules_to_save": options.modules_to_save,
            "init": options.init_weights,
        }
    )


def choose_trainable(name: str, module: nn.Module, globs: Iterable[str]) -> None:
    """Freeze every parameter that matches none of the family's globs."""
    patterns = tuple(globs)
    chosen = 0
    for parameter_name, parameter in module.named_parameters():
        trained = any(fnmatchcase(parameter_name, pattern) for pattern in patterns)
        parameter.requires_grad_(trained)
        chosen += trained
    if not chosen:
        raise BadInput(f"{name}: none of its parameters matches {list(patterns)}; nothing to train")

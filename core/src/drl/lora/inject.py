"""Putting adapters into a model, filling them, and switching them off."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import nn

from drl.lora.config import LoraConfig, matching_key
from drl.lora.errors import LoraError, name_list
from drl.lora.init import INIT_SCHEMES
from drl.lora.layer import LoraLinear
from drl.lora.matching import check_match, match_targets
from drl.lora.naming import to_plain_name
from drl.lora.sharding import copy_into


def inject(
    module: nn.Module,
    config: LoraConfig,
    *,
    generator: torch.Generator,
    dtype: torch.dtype = torch.float32,
) -> tuple[str, ...]:
    """Wrap the matching Linears in place, freeze everything else, and fill the adapters.

    Returns the plain paths of the wrapped layers in registration order. Adapters have ``dtype``
    whatever the base has. On a module with meta parameters filling is left to the caller: call
    ``reset_adapters`` once the parameters have storage. Raises ``LoraError`` before changing
    anything: an entry that matches nothing, a match that is no Linear, adapters already there, a
    generator that is not on the CPU.
    """
    _check_generator(generator)
    _check_bare(module)
    match = match_targets(module, config)
    check_match(match, module)
    wrap(module, match.linears, config, dtype=dtype)
    if not any(layer.down.is_meta for layer in lora_layers(module).values()):
        reset_adapters(module, generator)
    return tuple(match.linears)


def wrap(
    module: nn.Module, linears: Mapping[str, nn.Linear], config: LoraConfig, *, dtype: torch.dtype
) -> None:
    """Replace ``linears`` by wrapped ones, adapters uninitialised, and freeze all else."""
    places = _places(module, linears)
    _warn_unused_patterns(config, linears)
    module.requires_grad_(False)
    for fqn, linear in linears.items():
        layer = LoraLinear(
            linear,
            rank=config.rank_of(fqn),
            alpha=config.alpha_of(fqn),
            scale=config.scale_of(fqn),
            init=config.init,
            dropout=config.dropout,
            dtype=dtype,
        )
        parent, child = places[fqn]
        setattr(parent, child, layer.train(linear.training))


def reset_adapters(module: nn.Module, generator: torch.Generator) -> None:
    """Fill all adapters with fresh start values, drawn layer by layer in sorted name order.

    Values are drawn in float32 on the CPU and then moved, so they do not depend on device, dtype,
    sharding or rank. Under sharding every rank calls this with equally seeded generators.
    """
    _check_generator(generator)
    layers = lora_layers(module)
    if not layers:
        raise LoraError("the module has no adapters to reset; call inject first")
    unready = [fqn for fqn, layer in layers.items() if layer.down.is_meta or layer.up.is_meta]
    if unready:
        raise LoraError(
            f"adapters on the meta device cannot be filled: {name_list(unready)}; give them "
            "storage first (module.to_empty(device=...) and load the base weights)"
        )
    for fqn in sorted(layers):
        layer = layers[fqn]
        draw = INIT_SCHEMES[layer.init]
        A, B = draw(layer.rank, layer.in_features, layer.out_features, generator)
        copy_into(layer.down, A)
        copy_into(layer.up, B)


def lora_layers(module: nn.Module) -> dict[str, LoraLinear]:
    """Return the wrapped layers by plain path, in registration order."""
    named = module.named_modules()
    return {to_plain_name(name): child for name, child in named if isinstance(child, LoraLinear)}


@contextmanager
def adapter_off(module: nn.Module) -> Iterator[None]:
    """Make ``module`` compute with its base weights only: the reference policy.

    May be nested, and restores on exceptions. Raises ``LoraError`` when there are no adapters,
    because the reference would then silently be the policy itself.
    """
    layers = list(lora_layers(module).values())
    if not layers:
        raise LoraError("the module has no adapters to switch off; call inject first")
    for layer in layers:
        layer.off_depth += 1
    try:
        yield
    finally:
        for layer in layers:
            layer.off_depth -= 1


def _check_generator(generator: torch.Generator) -> None:
    if generator.device.type != "cpu":
        raise LoraError(
            f"the generator is on {generator.device}; adapters are drawn on the CPU so that they "
            'do not depend on the device: pass torch.Generator("cpu")'
        )


def _check_bare(module: nn.Module) -> None:
    if lora_layers(module):
        raise LoraError("the module already has adapters; inject works on a module without any")


def _places(
    module: nn.Module, linears: Mapping[str, nn.Linear]
) -> dict[str, tuple[nn.Module, str]]:
    """Map each plain path to the parent module and attribute name that hold the Linear."""
    found: dict[int, list[tuple[nn.Module, str]]] = {id(linear): [] for linear in linears.values()}
    for parent in module.modules():
        for child, candidate in parent.named_children():
            if id(candidate) in found:
                found[id(candidate)].append((parent, child))
    for fqn, linear in linears.items():
        parents = found[id(linear)]
        if len(parents) > 1:
            raise LoraError(
                f"{fqn} is one module used in {len(parents)} places, so adapting it here would "
                "change the others too; list it in exclude_modules"
            )
        if isinstance(parents[0][0], nn.MultiheadAttention):
            raise LoraError(
                f"{fqn} belongs to an nn.MultiheadAttention, which reads the weight and never "
                "calls the layer, so the adapter would have no effect; list it in exclude_modules"
            )
    return {fqn: found[id(linear)][0] for fqn, linear in linears.items()}


def _warn_unused_patterns(config: LoraConfig, fqns: Mapping[str, nn.Linear]) -> None:
    for name, pattern in (
        ("rank_pattern", config.rank_pattern),
        ("alpha_pattern", config.alpha_pattern),
    ):
        used = {matching_key(pattern, fqn) for fqn in fqns}
        unused = [key for key in pattern if key not in used]
        if unused:
            warnings.warn(
                f"{name} keys that decide no adapted module: {name_list(unused)}", stacklevel=4
            )

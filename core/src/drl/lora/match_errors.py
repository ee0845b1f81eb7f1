"""What is wrong with a match, in words: entries that hit nothing, layers that cannot be adapted."""

from __future__ import annotations

import difflib
from collections.abc import Iterable

from torch import nn

from drl.lora.config import LoraConfig
from drl.lora.errors import LoraError, name_list
from drl.lora.matching import TargetMatch
from drl.lora.tree import check_single_use, hosts, places

RULES = {
    "target_modules": "an entry of a list must equal the last components of a module path, a "
    "single str must match the whole path as a regular expression",
    "exclude_modules": "an entry of a list must equal the last components of a module path, a "
    "single str must match the whole path as a regular expression",
    "modules_to_save": "an entry must equal the last components of a module path",
    "rank_pattern": "a key must match the last components of the path of an adapted layer",
    "alpha_pattern": "a key must match the last components of the path of an adapted layer",
    "layers_to_transform": "it must be the number of a block that has a targeted module",
    "layers_pattern": "it must be the name of a list of blocks that have a targeted module",
}


def check_match(match: TargetMatch, module: nn.Module, config: LoraConfig) -> None:
    """Raise ``LoraError`` for an entry that hit nothing, and for a hit that cannot be adapted."""
    for field in RULES:
        entries = [entry for where, entry in match.unmatched if where == field]
        if entries:
            raise LoraError(_unmatched_message(field, entries, match, module))
    if match.others:
        listed = name_list(f"{fqn} ({type(m).__name__})" for fqn, m in match.others.items())
        raise LoraError(
            f"target_modules hits modules that cannot be adapted: {listed}. Linear, Conv1d, Conv2d, "
            "Conv3d and Embedding layers can; use longer names in target_modules, or list these in "
            "exclude_modules"
        )
    check_places(match, module, config)


def check_places(match: TargetMatch, module: nn.Module, config: LoraConfig) -> None:
    """Raise ``LoraError`` when nothing is to be adapted, or where an adapter would do nothing."""
    if not match.layers:
        raise LoraError(_nothing_message(module, config))
    check_single_use(module, (*match.layers, *match.saved, *match.biases))
    for fqn, place in match.layers.items():
        if isinstance(place.parent, nn.MultiheadAttention):
            raise LoraError(
                f"{fqn} belongs to an nn.MultiheadAttention, which reads the weight and never "
                "calls the layer, so the adapter would have no effect; list it in exclude_modules"
            )
    if config.bias == "all" and "bias" in dict(module.named_parameters(recurse=False)):
        raise LoraError(
            f'{type(module).__name__} itself has a parameter "bias", which no adapter can replace; '
            'take bias = "lora_only"'
        )
    _check_saved(match, config)
    if config.needs_base:
        _check_base_start(match, config)


def _check_base_start(match: TargetMatch, config: LoraConfig) -> None:
    for fqn, place in match.layers.items():
        where = f'init = "{config.init}" at {fqn}'
        if not isinstance(place.module, nn.Linear):
            raise LoraError(
                f"{where}: it starts from the weight of a Linear, not of a "
                f"{type(place.module).__name__}; take another init, or exclude this module"
            )
        most = min(place.module.weight.shape)
        if config.rank_of(fqn) > most:
            raise LoraError(
                f"{where}: the weight {list(place.module.weight.shape)} has no {config.rank_of(fqn)} "
                f"directions; lower the rank (r, rank_pattern) to {most}"
            )
        if config.scale_of(fqn) == 0:
            raise LoraError(f"{where}: alpha is 0, so that its start would be infinite")


def _check_saved(match: TargetMatch, config: LoraConfig) -> None:
    for fqn, place in match.saved.items():
        if hosts(place.module):
            raise LoraError(
                f"modules_to_save names {fqn}, in which another adapter lives; a copy of it would "
                "hold that adapter too. Adapt it in both, or save it in both"
            )
        if isinstance(place.module, nn.ModuleList | nn.ModuleDict):
            raise LoraError(
                f"modules_to_save names {fqn}, a {type(place.module).__name__}, which the model "
                "does not call; name the modules inside it"
            )
        if not any(fqn == e or fqn.endswith("." + e) for e in config.modules_to_save):
            raise LoraError(
                f"modules_to_save = {list(config.modules_to_save)} also ends the path {fqn}, which "
                "PEFT would save as well; use longer names, such as whole paths"
            )


def _nothing_message(module: nn.Module, config: LoraConfig) -> str:
    if config.layers_to_transform is not None:
        return (
            f"no module matched: none of the targeted modules of {type(module).__name__} lies in "
            f"layers_to_transform = {list(config.layers_to_transform)}. Without layers_pattern a "
            "list at the root of the model is not counted; name it there"
        )
    return (
        "no module matched: exclude_modules and modules_to_save remove every module that "
        f"target_modules names, or {type(module).__name__} has no layer inside that can be adapted"
    )


def _unmatched_message(
    field: str, entries: list[str], match: TargetMatch, module: nn.Module
) -> str:
    quoted = name_list(f'"{entry}"' for entry in entries)
    return (
        f"no module matched {quoted} ({field}) in {type(module).__name__}; "
        f"{_near(field, entries, match, module)}. {RULES[field][0].upper()}{RULES[field][1:]}"
    )


def _near(field: str, entries: list[str], match: TargetMatch, module: nn.Module) -> str:
    if field.startswith("layers_"):
        return f"adapted are {name_list(match.layers)}"
    found = places(module)
    linears = [fqn for fqn, place in found.items() if isinstance(place.module, nn.Linear)]
    listed = list(match.layers) if field.endswith("_pattern") else linears
    suffixes = {suffix for fqn in (listed or found) for suffix in _suffixes(fqn)}
    if field == "modules_to_save":
        suffixes = {suffix for fqn in found for suffix in _suffixes(fqn)}
    near = {n for entry in entries for n in difflib.get_close_matches(entry, suffixes, n=3)}
    if near:
        return f"near names: {', '.join(sorted(near))}"
    return f"it has: {name_list(listed or found)}"


def _suffixes(fqn: str) -> Iterable[str]:
    components = fqn.split(".")
    return [".".join(components[at:]) for at in range(len(components))]

"""Which modules a config adapts, saves in full, and takes biases of (PEFT's rules, lora.md 1.2 to 1.6).

``all-linear`` here means every ``nn.Linear``; PEFT also leaves out the output embedding of a
language model, which a diffusion transformer does not have (name it in ``exclude_modules``).
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from torch import nn

from drl.lora.config import ALL_LINEAR, LoraConfig, matching_key
from drl.lora.layer import can_adapt
from drl.lora.tree import Place, places


@dataclass(frozen=True, slots=True, kw_only=True)
class TargetMatch:
    """What a config matches in a model; all paths are plain and in registration order.

    ``layers``: to be adapted. ``others``: matched, but of a class that cannot be adapted.
    ``saved``: to be trained in full. ``biases``: whose bias trains, adapted or not. ``unmatched``:
    (field, entry) pairs of the config that hit nothing at all.
    """

    layers: dict[str, Place]
    others: dict[str, nn.Module]
    saved: dict[str, Place]
    biases: dict[str, Place]
    unmatched: tuple[tuple[str, str], ...]


def matches(spec: tuple[str, ...] | str, fqn: str) -> bool:
    """Say whether a module path fits: a whole-path regex (str), or a suffix of whole components."""
    if isinstance(spec, str):
        return re.fullmatch(spec, fqn) is not None
    return any(_is_suffix(entry, fqn) for entry in spec)


def is_targeted(config: LoraConfig, fqn: str) -> bool:
    """Say whether ``config`` adapts the module at this path, if it is of a class that can be."""
    if matches(config.exclude_modules, fqn) or is_in_saved(config.modules_to_save, fqn):
        return False
    everything = config.target_modules == ALL_LINEAR
    return (everything or matches(config.target_modules, fqn)) and is_in_layers(config, fqn)


def is_in_layers(config: LoraConfig, fqn: str) -> bool:
    """Apply ``layers_to_transform``: the first number after ``<something>.`` is the layer's."""
    if config.layers_to_transform is None:
        return True
    number = layer_number(config.layers_pattern, fqn)
    return number is not None and number in config.layers_to_transform


def layer_number(layers_pattern: tuple[str, ...], fqn: str) -> int | None:
    """Return the number of the layer that a path lies in; None when it lies in none."""
    forms = [rf"(?:^|.*?\.){pattern}\.(\d+)\." for pattern in layers_pattern]
    found = (re.match(form, fqn) for form in forms or [r".*?\.[^.]*\.(\d+)\."])
    return next((int(match[1]) for match in found if match), None)


def is_in_saved(entries: tuple[str, ...], fqn: str) -> bool:
    """Say whether a path is, or lies in, a module of ``modules_to_save``, by whole components."""
    return any(re.match(rf"(^|.*\.){entry}($|\..*)", fqn) is not None for entry in entries)


def match_targets(module: nn.Module, config: LoraConfig) -> TargetMatch:
    """Collect what ``config`` concerns in ``module``; changes nothing. The root never matches."""
    found = places(module)
    everything = config.target_modules == ALL_LINEAR
    hits = {
        fqn: place
        for fqn, place in found.items()
        if is_targeted(config, fqn) and (not everything or isinstance(place.module, nn.Linear))
    }
    layers = {fqn: place for fqn, place in hits.items() if can_adapt(place.module)}
    saved = _outermost({f: p for f, p in found.items() if ends_saved(config.modules_to_save, f)})
    return TargetMatch(
        layers=layers,
        others={fqn: p.module for fqn, p in hits.items() if not can_adapt(p.module)},
        saved=saved,
        biases=_biases(config, layers, found, saved),
        unmatched=tuple(_unmatched(config, found, layers)),
    )


def ends_saved(entries: tuple[str, ...], fqn: str) -> bool:
    """Apply PEFT's rule of what ``modules_to_save`` wraps: the path ends with the entry, as text."""
    return any(fqn.endswith(entry) for entry in entries)


def _outermost(chosen: dict[str, Place]) -> dict[str, Place]:
    return {
        fqn: place
        for fqn, place in chosen.items()
        if not any(fqn.startswith(other + ".") for other in chosen)
    }


def _biases(
    config: LoraConfig,
    layers: Mapping[str, Place],
    found: Mapping[str, Place],
    saved: Mapping[str, Place],
) -> dict[str, Place]:
    if config.bias == "none":
        return {}
    considered = found if config.bias == "all" else layers
    return {
        fqn: place
        for fqn, place in considered.items()
        if "bias" in dict(place.module.named_parameters(recurse=False))
        and not any(f"{fqn}.".startswith(f"{other}.") for other in saved)
    }


def _unmatched(
    config: LoraConfig, names: Iterable[str], layers: Iterable[str]
) -> Iterable[tuple[str, str]]:
    targets = () if config.target_modules == ALL_LINEAR else config.target_modules
    for field, spec in (("target_modules", targets), ("exclude_modules", config.exclude_modules)):
        for entry in (spec,) if isinstance(spec, str) else spec:
            form = entry if isinstance(spec, str) else (entry,)
            if not any(matches(form, name) for name in names):
                yield field, entry
    for entry in config.modules_to_save:
        if not any(_is_suffix(entry, name) for name in names):
            yield "modules_to_save", entry
    for field, pattern in _patterns(config):
        for key in pattern:
            if not any(matching_key({key: 0}, fqn) for fqn in layers):
                yield field, key
    yield from _unmatched_layers(config, list(layers))


def _patterns(config: LoraConfig) -> tuple[tuple[str, Mapping[str, float]], ...]:
    return ("rank_pattern", config.rank_pattern), ("alpha_pattern", config.alpha_pattern)


def _unmatched_layers(config: LoraConfig, layers: list[str]) -> Iterable[tuple[str, str]]:
    if not layers:  # the target entries, or all of the numbers, are to blame
        return
    hit = {layer_number(config.layers_pattern, fqn) for fqn in layers}
    for number in config.layers_to_transform or ():
        if number not in hit:
            yield "layers_to_transform", str(number)
    for pattern in config.layers_pattern:
        if all(layer_number((pattern,), fqn) is None for fqn in layers):
            yield "layers_pattern", pattern


def unused_keys(config: LoraConfig, layers: Iterable[str]) -> list[tuple[str, str]]:
    """Return (field, key) of pattern keys that match a layer but decide none: an earlier key wins."""
    paths = list(layers)
    unused = []
    for field, pattern in _patterns(config):
        used = {matching_key(pattern, fqn) for fqn in paths}
        unused += [
            (field, key)
            for key in pattern
            if key not in used and any(matching_key({key: 0}, fqn) for fqn in paths)
        ]
    return unused


def _is_suffix(entry: str, fqn: str) -> bool:
    return fqn == entry or fqn.endswith("." + entry)

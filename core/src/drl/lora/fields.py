"""Settings by name: drl's spelling and PEFT's, brought together (lora.md 1.1)."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from typing import Any

from drl.lora.errors import LoraError, name_list, shown

SPELLINGS = {
    "rank": ("rank", "r"),
    "alpha": ("alpha", "lora_alpha"),
    "target_modules": ("target_modules", "lora_modules"),
    "dropout": ("dropout", "lora_dropout"),
    "init": ("init", "init_weights", "init_lora_weights"),
    "exclude_modules": ("exclude_modules",),
    "rank_pattern": ("rank_pattern",),
    "alpha_pattern": ("alpha_pattern",),
    "use_rslora": ("use_rslora",),
    "bias": ("bias",),
    "modules_to_save": ("modules_to_save",),
    "layers_to_transform": ("layers_to_transform",),
    "layers_pattern": ("layers_pattern",),
}
DEFAULTS: Mapping[str, Any] = {"rank": 8, "alpha": 8, "target_modules": (), "init": True}
# PEFT writes the first two as booleans.
INIT_NAMES = {True: "kaiming-uniform", False: "random"}


def canonical(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments of ``LoraConfig`` for fields in either spelling."""
    known = [spelling for spellings in SPELLINGS.values() for spelling in spellings]
    unknown = [name for name in fields if name not in known]
    if unknown:
        near = {n for name in unknown for n in difflib.get_close_matches(str(name), known, n=2)}
        hint = f"near names: {', '.join(sorted(near))}" if near else f"known: {', '.join(known)}"
        raise LoraError(f"unknown LoRA settings {name_list(map(str, unknown))}; {hint}")
    chosen = {name: value_of(fields, spellings) for name, spellings in SPELLINGS.items()}
    values = {**DEFAULTS, **{name: v for name, v in chosen.items() if v is not None}}
    return {**values, "init": init_name(values["init"])}


def value_of(fields: Mapping[str, Any], spellings: tuple[str, ...]) -> Any:
    """Return the value that the spellings agree on, None when all are absent or null."""
    given = {name: fields[name] for name in spellings if fields.get(name) is not None}
    if not given:
        return None
    (first, value), *others = given.items()
    for name, other in others:
        if _comparable(other) != _comparable(value):
            raise LoraError(
                f"{first} = {shown(value)} and {name} = {shown(other)} are two spellings of one "
                "setting with different values; give one of them"
            )
    return value


def init_name(value: object) -> object:
    """Return drl's name of a start scheme; PEFT calls its first two ``true`` and ``false``."""
    if isinstance(value, bool):
        return INIT_NAMES[value]
    return value.lower() if isinstance(value, str) else value


def _comparable(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value

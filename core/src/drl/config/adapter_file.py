"""What an adapter directory says of itself, read without torch: checking a recipe stays light."""

from __future__ import annotations

import json
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from drl.config.sections.model import LoraSection

CONFIG_FILE = "adapter_config.json"
# What the file says under one name and a recipe under others.
RECIPE_KEYS = {
    "r": ("rank", "r"),
    "lora_alpha": ("alpha", "lora_alpha"),
    "target_modules": ("target_modules", "lora_modules"),
    "exclude_modules": ("exclude_modules",),
    "rank_pattern": ("rank_pattern",),
    "alpha_pattern": ("alpha_pattern",),
    "layers_to_transform": ("layers_to_transform",),
    "layers_pattern": ("layers_pattern",),
    "use_rslora": ("use_rslora",),
    "lora_dropout": ("dropout",),
    "bias": ("bias",),
    "modules_to_save": ("modules_to_save",),
}
DEFAULTS = {"r": 8, "lora_alpha": 8, "bias": "none"}


def adapter_directories(path: Path, components: Sequence[str]) -> dict[str, Path]:
    """Return the directory of each component: the path itself for one, a folder in it for several."""
    if len(components) == 1:
        return {components[0]: path}
    return {component: path / component for component in components}


def adapter_settings(directory: Path) -> dict[str, Any] | None:
    """Return the fields of ``adapter_config.json``; None where there is no such JSON object."""
    try:
        fields = json.loads((directory / CONFIG_FILE).read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return None
    return {**DEFAULTS, **fields} if isinstance(fields, dict) else None


def options_of_adapter(directory: Path) -> dict[str, Any]:
    """Return the options of ``[lora]`` that an adapter settles; those it states wrongly are left out."""
    stored = adapter_settings(directory) or {}
    found: dict[str, Any] = {}
    for field, (key, *_) in RECIPE_KEYS.items():
        value = stored.get(field)
        if value is None or value in ([], ""):
            continue
        with suppress(ValidationError):
            found[key] = vars(LoraSection.model_validate({key: value}))[key]
    return found

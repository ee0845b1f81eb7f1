"""Adapter directories that PEFT and diffusers read without settings (lora.md 3).

A directory holds ``adapter_config.json`` and ``adapter_model.safetensors`` for PEFT, and
``pytorch_lora_weights.safetensors`` for a diffusers pipeline. diffusers never reads the JSON: it
takes the strength from the ``lora_adapter_metadata`` entry of the safetensors header, and without
it every adapter loads at scale 1.0.
"""

from __future__ import annotations

import json
import os
import warnings
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import nn

from drl.lora.atomic import replaced_directory
from drl.lora.config import ALL_LINEAR, LoraConfig
from drl.lora.errors import AdapterNotFound, LoraError, name_list, shown
from drl.lora.inject import lora_layers, wrap
from drl.lora.layer import LoraLinear
from drl.lora.matching import match_targets, matches
from drl.lora.naming import PEFT_PREFIX, adapter_key
from drl.lora.peft_config import CONFIG_FILE, config_fields, read_config
from drl.lora.peft_tensors import (
    PICKLE_FILE,
    WEIGHTS_FILE,
    check_pairs,
    read_tensors,
    state_of_file,
)
from drl.lora.state import adapter_state, check_state, load_adapter_state

DIFFUSERS_FILE = "pytorch_lora_weights.safetensors"
REPLACEABLE = frozenset({CONFIG_FILE, WEIGHTS_FILE, PICKLE_FILE, DIFFUSERS_FILE, "README.md"})


def save_peft(
    module_or_state: nn.Module | Mapping[str, torch.Tensor],
    directory: str | os.PathLike[str],
    config: LoraConfig,
    *,
    base_model: str | None,
    component: str = "transformer",
) -> None:
    """Write an adapter for PEFT and for diffusers.

    ``module_or_state``: a module with adapters, or an ``adapter_state`` of it; tensors keep their
    dtype. ``base_model``: name or path of the model that was adapted, for the config's
    ``base_model_name_or_path``. ``component``: the pipeline component that the adapter belongs to,
    the key prefix in the diffusers file.

    The directory appears complete or not at all. An earlier adapter there is replaced; any other
    content raises ``LoraError``, as do tensors that do not fit ``config`` or are not finite. Under
    FSDP2 gather with ``adapter_state`` on every rank, then call this with the state on one rank.
    """
    target = Path(directory).resolve()
    _check_component(component)
    _check_replaceable(target)
    state = _state_to_write(module_or_state, config)
    fqns = check_pairs(state, config)
    _check_targeted(fqns, config)
    fields = config_fields(config, fqns, base_model=base_model)
    with replaced_directory(target) as fresh:
        text = json.dumps(fields, indent=2, sort_keys=True) + "\n"
        (fresh / CONFIG_FILE).write_text(text, encoding="utf-8")
        _write_tensors(fresh / WEIGHTS_FILE, state, fields, prefix=PEFT_PREFIX)
        _write_tensors(fresh / DIFFUSERS_FILE, state, fields, prefix=f"{component}.")


def read_peft(
    directory: str | os.PathLike[str],
) -> tuple[LoraConfig, dict[str, torch.Tensor]]:
    """Read an adapter directory without a model.

    Returns the config and a state ``<fqn>.lora_A.weight`` [rank, in], ``<fqn>.lora_B.weight``
    [out, rank] on the CPU in the file's dtypes. Raises ``AdapterNotFound`` for missing files and
    ``LoraError``, naming the field or key, for everything that is damaged, contradicts itself or
    belongs to an unsupported variant.
    """
    path = Path(directory)
    if not path.is_dir():
        raise AdapterNotFound(f"{path} is no directory; give the folder that holds {CONFIG_FILE}")
    config = read_config(path)
    tensors = read_tensors(path)
    try:
        state = state_of_file(tensors)
        check_pairs(state, config)
    except LoraError as error:
        raise LoraError(f"{path}: {error}") from error
    return config, state


def load_peft(
    module: nn.Module,
    directory: str | os.PathLike[str],
    *,
    dtype: torch.dtype = torch.float32,
) -> LoraConfig:
    """Load an adapter directory into ``module``, injecting adapters of ``dtype`` if it has none.

    Strict, and checked before the module changes: every targeted Linear has its pair in the file,
    every pair belongs to a targeted Linear, and shapes and strengths fit. Returns the file's
    config. A target entry that matches nothing gives a warning when the tensors are complete.
    """
    config, state = read_peft(directory)
    layers = lora_layers(module)
    try:
        if layers:
            _check_strengths(layers, config)
        else:
            _wrap_for(module, config, state, dtype)
        load_adapter_state(module, state)
    except LoraError as error:
        raise LoraError(f"{Path(directory)}: {error}") from error
    return config


def _wrap_for(
    module: nn.Module, config: LoraConfig, state: Mapping[str, torch.Tensor], dtype: torch.dtype
) -> None:
    match = match_targets(module, config)
    if not match.linears:
        raise LoraError(
            f"no module matched target_modules = {shown(config.target_modules)} in "
            f"{type(module).__name__}; the adapter belongs to another model"
        )
    on_meta = [fqn for fqn, linear in match.linears.items() if linear.weight.is_meta]
    if on_meta:
        raise LoraError(
            f"the module has no storage yet at {name_list(on_meta)}; load the base weights first, "
            "or inject, materialise and then load_peft"
        )
    check_state(_shapes(match.linears, config), state)
    if match.unmatched:
        warnings.warn(
            "target_modules or exclude_modules entries that match no module: "
            f"{name_list(match.unmatched)}",
            stacklevel=3,
        )
    wrap(module, match.linears, config, dtype=dtype)


def _shapes(linears: Mapping[str, nn.Linear], config: LoraConfig) -> dict[str, torch.Size]:
    shapes: dict[str, torch.Size] = {}
    for fqn, linear in linears.items():
        rank = config.rank_of(fqn)
        shapes[adapter_key(fqn, "lora_A")] = torch.Size([rank, linear.in_features])
        shapes[adapter_key(fqn, "lora_B")] = torch.Size([linear.out_features, rank])
    return shapes


def _check_strengths(layers: Mapping[str, LoraLinear], config: LoraConfig) -> None:
    wrong = [
        f"{fqn} (file {config.scale_of(fqn)}, model {layer.scale})"
        for fqn, layer in layers.items()
        if config.scale_of(fqn) != layer.scale
    ]
    if wrong:
        raise LoraError(
            f"the adapter would run at another strength than it was saved with: "
            f"{name_list(wrong)}; set rank and alpha to those of its {CONFIG_FILE}"
        )


def _state_to_write(
    module_or_state: nn.Module | Mapping[str, torch.Tensor], config: LoraConfig
) -> dict[str, torch.Tensor]:
    if not isinstance(module_or_state, nn.Module):
        return dict(module_or_state)
    _check_strengths(lora_layers(module_or_state), config)
    return adapter_state(module_or_state)


def _write_tensors(
    path: Path, state: Mapping[str, torch.Tensor], fields: Mapping[str, Any], *, prefix: str
) -> None:
    described = {prefix + key: value for key, value in fields.items()}
    metadata = {
        "format": "pt",
        "lora_adapter_metadata": json.dumps(described, indent=2, sort_keys=True),
    }
    # Copies: safetensors refuses tensors that are strided or share memory.
    tensors = {
        prefix + key: tensor.detach().to("cpu", copy=True).contiguous()
        for key, tensor in state.items()
    }
    save_file(tensors, path, metadata=metadata)


def _check_component(component: str) -> None:
    if not component.isidentifier():
        raise LoraError(
            f'component is "{component}"; it must be the name of a pipeline component, such as '
            '"transformer"'
        )


def _check_targeted(fqns: Collection[str], config: LoraConfig) -> None:
    if config.target_modules == ALL_LINEAR:
        return
    stray = [
        fqn
        for fqn in fqns
        if not matches(config.target_modules, fqn) or matches(config.exclude_modules, fqn)
    ]
    if stray:
        raise LoraError(
            f"target_modules and exclude_modules do not select {name_list(stray)}, so a reader of "
            "the directory would drop these adapters; pass the config that inject was given"
        )


def _check_replaceable(directory: Path) -> None:
    if not directory.exists():
        return
    if not directory.is_dir():
        raise LoraError(f"{directory} is a file; give a new path or an adapter directory")
    content = sorted(path.name for path in directory.iterdir())
    foreign = [name for name in content if name not in REPLACEABLE]
    if foreign or (content and CONFIG_FILE not in content):
        raise LoraError(
            f"{directory} is no plain adapter directory, it holds {name_list(foreign or content)}; "
            "it would be replaced as a whole, so give a new path"
        )

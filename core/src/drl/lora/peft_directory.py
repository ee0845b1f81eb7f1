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
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import nn

from drl.lora.atomic import replaced_directory
from drl.lora.config import LoraConfig
from drl.lora.errors import AdapterNotFound, LoraError, name_list, shown
from drl.lora.inject import check_injectable, rebuild_starts, wrap
from drl.lora.layer import DEFAULT, adapted
from drl.lora.match_errors import check_places
from drl.lora.matching import TargetMatch, match_targets
from drl.lora.naming import PEFT_PREFIX, adapter_key
from drl.lora.peft_config import CONFIG_FILE, config_fields, read_config
from drl.lora.peft_tensors import (
    PICKLE_FILE,
    WEIGHTS_FILE,
    check_tensors,
    read_tensors,
    state_of_file,
)
from drl.lora.snapshot import AdapterSnapshot, adapter_snapshot, check_described, snapshot_of
from drl.lora.state import check_state, load_adapter_state
from drl.lora.tensor_file import save_tensors
from drl.lora.tree import adapter_names, base_state

DIFFUSERS_FILE = "pytorch_lora_weights.safetensors"
REPLACEABLE = frozenset({CONFIG_FILE, WEIGHTS_FILE, PICKLE_FILE, DIFFUSERS_FILE, "README.md"})


def write_peft(
    snapshot: AdapterSnapshot,
    directory: str | os.PathLike[str],
    *,
    base_model: str | None,
    component: str = "transformer",
) -> None:
    """Write an adapter for PEFT and for diffusers.

    ``base_model``: name or path of the model that was adapted, for the config's
    ``base_model_name_or_path``. ``component``: the pipeline component that the adapter belongs to,
    the key prefix in the diffusers file.

    The directory appears complete or not at all. An earlier adapter there is replaced; any other
    content raises ``LoraError``, as do tensors that do not fit their config or are not finite, and
    a place that cannot be written. Not a collective: call it on one rank.
    """
    target = Path(directory).resolve()
    _check_component(component)
    _check_replaceable(target)
    snapshot_of(snapshot.tensors, snapshot.config)
    fields = config_fields(snapshot.config, snapshot.targets, base_model=base_model)
    try:
        with replaced_directory(target) as fresh:
            text = json.dumps(fields, indent=2, sort_keys=True) + "\n"
            (fresh / CONFIG_FILE).write_text(text, encoding="utf-8")
            for file, prefix in ((WEIGHTS_FILE, PEFT_PREFIX), (DIFFUSERS_FILE, f"{component}.")):
                _write_tensors(fresh / file, snapshot.tensors, fields, prefix=prefix)
    except (OSError, SafetensorError) as error:
        raise LoraError(
            f"the adapter cannot be written to {target} ({error}); what was there is as it was. "
            "Make room, or give a directory that can be written"
        ) from error


def save_peft(
    module_or_state: nn.Module | Mapping[str, torch.Tensor],
    directory: str | os.PathLike[str],
    config: LoraConfig,
    *,
    base_model: str | None,
    component: str = "transformer",
) -> None:
    """Write an adapter: ``adapter_snapshot`` and ``write_peft`` in one.

    ``module_or_state``: a module with adapters, or an ``adapter_state`` of it; tensors keep their
    dtype. Under FSDP2 take the snapshot on every rank, then write it on one.
    """
    if isinstance(module_or_state, nn.Module):
        snapshot = adapter_snapshot(module_or_state, config)
    else:
        snapshot = snapshot_of(dict(module_or_state), config)
    write_peft(snapshot, directory, base_model=base_model, component=component)


def read_peft(
    directory: str | os.PathLike[str],
) -> tuple[LoraConfig, dict[str, torch.Tensor]]:
    """Read an adapter directory without a model.

    Returns the config and a state with the keys of ``drl.lora.state``, on the CPU in the file's
    dtypes. Raises ``AdapterNotFound`` for missing files and ``LoraError``, naming the field or key,
    for everything that is damaged, contradicts itself, belongs to an unsupported variant, or means
    something only beside its base weights (``init_lora_weights`` pissa and olora: ``load_peft``
    reads those).
    """
    config, state = _read(Path(directory))
    if config.needs_base:
        raise LoraError(
            f'{Path(directory)}: init_lora_weights is "{config.init}", so the tensors are relative '
            "to start values taken from the base weights; load it into its model with load_peft "
            "and save it from there"
        )
    return config, state


def load_peft(
    module: nn.Module,
    directory: str | os.PathLike[str],
    *,
    name: str = DEFAULT,
    dtype: torch.dtype = torch.float32,
    trainable: bool = True,
) -> LoraConfig:
    """Load an adapter directory into ``module``, injecting adapter ``name`` if it is not there.

    Strict, and checked before the module changes: every targeted layer has its pair in the file,
    every tensor belongs to a targeted layer, a trained bias or a saved module, and shapes and
    strengths fit. Returns the file's config. An entry of the config that matches nothing gives a
    warning when the tensors are complete. ``dtype`` and ``trainable`` as in ``inject``.
    """
    path = Path(directory)
    config, state = _read(path)
    try:
        if name in adapter_names(module):
            check_described(module, config, name)
        else:
            _check_has_storage(module)
            _wrap_for(module, config, state, name=name, dtype=dtype, trainable=trainable)
        if config.needs_base:
            rebuild_starts(module, name)
        load_adapter_state(module, state, name)
    except LoraError as error:
        raise LoraError(f"{path}: {error}") from error
    return config


def inject_peft(
    module: nn.Module,
    directory: str | os.PathLike[str],
    *,
    name: str = DEFAULT,
    dtype: torch.dtype = torch.float32,
    trainable: bool = True,
) -> LoraConfig:
    """Inject the adapter of a directory as ``load_peft`` does, but leave its tensors without values.

    For modules on the meta device, whose values come from another rank or later.
    """
    path = Path(directory)
    config, state = _read(path)
    try:
        _wrap_for(module, config, state, name=name, dtype=dtype, trainable=trainable)
    except LoraError as error:
        raise LoraError(f"{path}: {error}") from error
    return config


def _read(path: Path) -> tuple[LoraConfig, dict[str, torch.Tensor]]:
    if not path.is_dir():
        raise AdapterNotFound(f"{path} is no directory; give the folder that holds {CONFIG_FILE}")
    config = read_config(path)
    tensors = read_tensors(path)
    try:
        state = state_of_file(tensors, config)
        check_tensors(state, config)
    except LoraError as error:
        raise LoraError(f"{path}: {error}") from error
    return config, state


def _wrap_for(
    module: nn.Module,
    config: LoraConfig,
    state: Mapping[str, torch.Tensor],
    *,
    name: str,
    dtype: torch.dtype,
    trainable: bool,
) -> None:
    check_injectable(module, name)
    match = match_targets(module, config)
    if not match.layers:
        raise LoraError(
            f"no module matched target_modules = {shown(config.target_modules)} in "
            f"{type(module).__name__}; the adapter belongs to another model"
        )
    check_places(match, module, config)
    check_state(_expected(match, config), state)
    if match.unmatched:
        listed = name_list(f"{entry} ({field})" for field, entry in match.unmatched)
        warnings.warn(f"entries that match no module: {listed}", stacklevel=3)
    wrap(module, match, config, name=name, dtype=dtype, trainable=trainable)


def _check_has_storage(module: nn.Module) -> None:
    on_meta = [fqn for fqn, parameter in module.named_parameters() if parameter.is_meta]
    if on_meta:
        raise LoraError(
            f"the module has no storage yet at {name_list(on_meta)}; load the base weights first, "
            "or inject, materialise and then load_peft"
        )


def _expected(match: TargetMatch, config: LoraConfig) -> dict[str, torch.Tensor]:
    """Return what a complete state has, by key, on the meta device."""
    wanted: dict[str, torch.Tensor] = {}
    for fqn, place in match.layers.items():
        layer = adapted(place.module)
        pair = layer.factor_shapes(config.rank_of(fqn))
        for matrix, shape in zip(layer.matrices, pair, strict=True):
            wanted[adapter_key(fqn, matrix)] = torch.empty(shape, device="meta")
    for fqn, place in match.biases.items():
        key = f"{fqn}.base_layer.bias" if fqn in match.layers else f"{fqn}.bias"
        wanted[key] = place.module.get_parameter("bias")
    for fqn, place in match.saved.items():
        wanted |= {f"{fqn}.{key}": value for key, value in base_state(place.module).items()}
    return wanted


def _write_tensors(
    path: Path, state: Mapping[str, torch.Tensor], fields: Mapping[str, Any], *, prefix: str
) -> None:
    described = {prefix + key: value for key, value in fields.items()}
    metadata = {"lora_adapter_metadata": json.dumps(described, indent=2, sort_keys=True)}
    save_tensors(path, {prefix + key: tensor for key, tensor in state.items()}, metadata)


def _check_component(component: str) -> None:
    if not component.isidentifier():
        raise LoraError(
            f'component is "{component}"; it must be the name of a pipeline component, such as '
            '"transformer"'
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

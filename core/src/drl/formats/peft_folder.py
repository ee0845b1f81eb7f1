"""PEFT directories: one adapter at the root, several in a folder per component."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from torch import Tensor

from drl.errors import BadInput
from drl.formats.adapter import Adapter, config_of, layers_of_state, state_of_layers
from drl.formats.detect import CONFIG_FILE, peft_folders
from drl.formats.diffusers_file import FILE, prefix_of
from drl.formats.headers import read_header
from drl.formats.layout import Layout, read_object
from drl.formats.names import DENOISERS
from drl.lora import AdapterSnapshot, LoraConfig, LoraError, write_peft
from drl.lora.peft_config import read_config
from drl.lora.peft_tensors import check_tensors, read_tensors, state_of_file
from drl.observe.files import write_json_atomic

BUNDLE_FILE = "drl_bundle.json"


def read_peft_folder(folder: Path, *, component: str | None = None) -> Adapter:
    """Read a PEFT directory, or a folder with one per component.

    The component of a single one is ``component``, else that of the diffusers file beside it, else
    "transformer". Raises BadInput for what is damaged, contradicts itself or is no LoRA adapter.
    """
    folders = peft_folders(folder)
    if list(folders) == [""]:
        folders = {component or _component_beside(folder): folder}
    components, configs, others = {}, {}, {}
    base_model = None
    for name, part in folders.items():
        try:
            config, state = read_relative(part)
        except LoraError as error:
            raise BadInput(str(error)) from error
        layers, rest = layers_of_state(state, config)
        components[name], configs[name] = layers, config
        if rest:
            others[name] = rest
        base_model = base_model or _base_model(part)
    return Adapter(
        components=components,
        configs=configs,
        others=others,
        base_model=base_model,
        boundary_ratio=_boundary(folder),
    )


def read_relative(folder: Path) -> tuple[LoraConfig, dict[str, Tensor]]:
    """Return config and state of one PEFT directory, those that count from start values too.

    ``drl.lora.read_peft`` refuses the latter; ``drl.formats.starts`` makes plain matrices of them.
    """
    config = read_config(folder)
    state = state_of_file(read_tensors(folder), config)
    check_tensors(state, config)
    return config, state


def write_peft_folder(adapter: Adapter, folder: Path, layout: Layout | None) -> None:
    """Write a PEFT directory, or one per component; ``folder`` must not hold anything yet."""
    for component, layers in adapter.components.items():
        config = config_of(adapter, component, (layout or {}).get(component))
        snapshot = AdapterSnapshot(
            config=config,
            tensors={**state_of_layers(layers), **adapter.others.get(component, {})},
            targets=tuple(layers),
        )
        target = folder if adapter.single else folder / component
        try:
            write_peft(snapshot, target, base_model=adapter.base_model, component=component)
        except LoraError as error:
            if isinstance(error.__cause__, OSError | SafetensorError):
                raise error.__cause__ from None  # the place, which the caller knows by its own name
            raise BadInput(str(error)) from error
    if not adapter.single and adapter.boundary_ratio is not None:
        write_json_atomic(folder / BUNDLE_FILE, {"boundary_ratio": adapter.boundary_ratio})


def _component_beside(folder: Path) -> str:
    if not (folder / FILE).is_file():
        return DENOISERS[0]
    prefixes = prefix_of(read_header(folder / FILE).tensors)
    return prefixes[0].removesuffix(".") if len(prefixes) == 1 else DENOISERS[0]


def _base_model(folder: Path) -> str | None:
    fields: Mapping[str, Any] = json.loads((folder / CONFIG_FILE).read_text("utf-8"))
    value = fields.get("base_model_name_or_path")
    return value if isinstance(value, str) and value else None


def _boundary(folder: Path) -> float | None:
    file = folder / BUNDLE_FILE
    value = read_object(file).get("boundary_ratio") if file.is_file() else None
    return float(value) if isinstance(value, int | float) else None

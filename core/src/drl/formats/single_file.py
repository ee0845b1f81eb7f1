"""Single files of kohya (sd-scripts, musubi) and ComfyUI: reading and writing (lora.md 3.4).

kohya: ``lora_unet_<flattened path>.lora_down.weight`` (A), ``.lora_up.weight`` (B), ``.alpha``; text
encoders under ``lora_te1_`` and ``lora_te2_``. ComfyUI: ``diffusion_model.<path>.lora_A.weight``,
``.lora_B.weight``, ``.alpha``. Paths may be those of diffusers or of the original repository, with fused
layers. The scale is ``alpha / rank``; without ``.alpha`` it is 1.

A file of two experts holds both: the second, ``transformer_2``, has the prefix ``lora_unet2_`` or
``diffusion_model_2.``; the header entry ``drl_bundle`` names the components and the boundary.
"""

from __future__ import annotations

import json
import warnings
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from drl.errors import BadInput
from drl.formats.adapter import Adapter, AdapterLayer, Layers
from drl.formats.fused import fuse, split
from drl.formats.layout import Layout
from drl.formats.names import (
    COMFY_DENOISER,
    KOHYA_DENOISER,
    TEXT_ENCODERS,
    ModuleNames,
    comfy_prefix,
    component_of_kohya,
    denoiser,
    flat,
    kohya_prefix,
    numbered,
    original_place,
)
from drl.lora.errors import name_list

BUNDLE = "drl_bundle"
SUFFIXES = {
    ".lora_down.weight": "A",
    ".lora_up.weight": "B",
    ".lora_A.weight": "A",
    ".lora_B.weight": "B",
    ".alpha": "alpha",
}


@dataclass(frozen=True, slots=True)
class Name:
    """A key without its matrix: the prefix that says the component, and the name of the module."""

    prefix: str
    module: str


def read_single_file(
    tensors: Mapping[str, Tensor], metadata: Mapping[str, str], layout: Layout
) -> Adapter:
    """Turn the tensors of a kohya or ComfyUI file into an adapter of the base model in ``layout``.

    Every key is used or the file is refused: BadInput names keys of other LoRA variants, modules that
    the base lacks or that a name could mean twice, and components that the base does not have.
    """
    found = _group(tensors)
    names: dict[str, ModuleNames] = {}
    components: dict[str, dict[str, AdapterLayer]] = defaultdict(dict)
    unknown = []
    for name, parts in found.items():
        component = component_of(name.prefix, layout)
        if component not in layout:
            raise BadInput(_absent(component, name, layout))
        modules = names.setdefault(component, ModuleNames(component, layout[component]))
        paths = modules.find(name.module)
        if paths is None:
            unknown.append(name.prefix + name.module)
            continue
        layers = _layers(name, parts, paths, [layout[component].weights[p][0] for p in paths])
        twice = sorted(set(layers) & set(components[component]))
        if twice:
            raise BadInput(
                f"two entries of the file adapt {component}.{twice[0]}; keep one of them"
            )
        components[component].update(layers)
    if unknown:
        raise BadInput(
            f"the base model has no modules of the names {name_list(sorted(unknown))}; the file belongs "
            "to another base"
        )
    _warn_without_alpha(found)
    in_order = {name: components[name] for name in layout if name in components}
    return Adapter(components=in_order, boundary_ratio=_boundary(metadata))


def component_of(prefix: str, layout: Layout) -> str:
    """Return the component that a key prefix stands for."""
    match = COMFY_DENOISER.fullmatch(prefix)
    if match is not None:
        return numbered(denoiser(layout), match.group(1))
    return component_of_kohya(prefix, layout)


def split_key(key: str) -> tuple[Name, str] | None:
    """Split a key into its name and "A", "B" or "alpha"; None when it is none of these formats."""
    suffix = next((one for one in SUFFIXES if key.endswith(one)), None)
    if suffix is None:
        return None
    stem = key.removesuffix(suffix)
    prefix = next((one for one in TEXT_ENCODERS if stem.startswith(one)), None)
    if prefix is None:
        match = KOHYA_DENOISER.match(stem) or COMFY_DENOISER.match(stem)
        prefix = match.group() if match else None
    if prefix is None or len(stem) == len(prefix):
        return None
    return Name(prefix, stem.removeprefix(prefix)), SUFFIXES[suffix]


def _group(tensors: Mapping[str, Tensor]) -> dict[Name, dict[str, Tensor]]:
    found: dict[Name, dict[str, Tensor]] = defaultdict(dict)
    strange = []
    for key, tensor in tensors.items():
        parts = split_key(key)
        if parts is None or parts[1] in found[parts[0]]:
            strange.append(key)
        else:
            found[parts[0]][parts[1]] = tensor
    if strange:
        raise BadInput(
            f"keys that belong to no LoRA pair: {name_list(sorted(strange))}; each module has one "
            "lora_down (or lora_A), one lora_up (or lora_B) and at most one alpha. DoRA, LoHa, LoKr and "
            "Tucker layers are not supported"
        )
    halves = [
        f"{name.prefix}{name.module} ({' and '.join(sorted({'A', 'B'} - set(parts)))})"
        for name, parts in found.items()
        if not {"A", "B"} <= set(parts)
    ]
    if halves:
        raise BadInput(
            f"modules without a matrix: {name_list(sorted(halves))}; copy the file again"
        )
    return found


def _layers(
    name: Name, parts: Mapping[str, Tensor], paths: Sequence[str], rows: Sequence[int]
) -> dict[str, AdapterLayer]:
    """Return the layers that one entry of the file adapts."""
    A, B = parts["A"], parts["B"]
    alpha = float(A.shape[0]) if "alpha" not in parts else _alpha(name, parts["alpha"])
    layer = AdapterLayer(A=A, B=B, alpha=alpha)
    if len(paths) == 1:
        return {paths[0]: layer}
    if B.shape[0] != sum(rows):
        raise BadInput(
            f"{name.prefix}{name.module} has {B.shape[0]} output rows, its {len(paths)} parts in the base "
            f"model have {sum(rows)}; the file belongs to another base"
        )
    cut = zip(paths, split(layer, rows), strict=True)
    return {path: part for path, part in cut if part is not None}


def _alpha(name: Name, tensor: Tensor) -> float:
    value = float(tensor) if tensor.numel() == 1 else float("nan")
    if not 0 <= value < float("inf"):
        raise BadInput(
            f"{name.prefix}{name.module}.alpha is {tensor.tolist()}; it must be one finite number, 0 or "
            "more"
        )
    return value


def _warn_without_alpha(found: Mapping[Name, Mapping[str, Tensor]]) -> None:
    without = [name.prefix + name.module for name, parts in found.items() if "alpha" not in parts]
    if without:
        warnings.warn(
            f"{len(without)} of {len(found)} modules have no alpha; they run at scale 1.0: "
            f"{name_list(without[:3])}",
            stacklevel=4,
        )


def _absent(component: str, name: Name, layout: Layout) -> str:
    what = "text encoder" if component.startswith("text_encoder") else "model"
    return (
        f"the file adapts the {what} '{component}' ({name.prefix}{name.module} and others), which the "
        f"base does not have; it has {', '.join(layout) or 'no component'}"
    )


def _boundary(metadata: Mapping[str, str]) -> float | None:
    value = bundle_of(metadata).get("boundary_ratio")
    return float(value) if isinstance(value, int | float) else None


def bundle_of(metadata: Mapping[str, str]) -> dict[str, Any]:
    """Return the header entry of drl about components and boundary; empty when there is none."""
    try:
        bundle = json.loads(metadata.get(BUNDLE, "{}"))
    except ValueError:
        bundle = None
    if not isinstance(bundle, dict):
        raise BadInput(f"the header entry {BUNDLE} is no JSON object; copy the file again")
    return bundle


def bundle_entry(adapter: Adapter, prefixes: Mapping[str, str]) -> dict[str, str]:
    """Return the header entry of a file with several components; empty for one component."""
    if len(adapter.components) == 1 and adapter.boundary_ratio is None:
        return {}
    bundle = {"version": 1, "components": prefixes, "boundary_ratio": adapter.boundary_ratio}
    return {BUNDLE: json.dumps(bundle)}


def kohya_tensors(adapter: Adapter, layout: Layout) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Return tensors and header metadata of a kohya file; original names where drl knows them."""
    prefixes = {component: kohya_prefix(component) for component in adapter.components}
    tensors: dict[str, Tensor] = {}
    for component, layers in adapter.components.items():
        for name, layer in named_layers(layers, layout, component).items():
            key = prefixes[component] + flat(name)
            tensors |= _written(key, layer, ("lora_down.weight", "lora_up.weight"))
    metadata = {"ss_network_module": "networks.lora", **_dimensions(adapter)}
    return tensors, metadata | bundle_entry(adapter, prefixes)


def comfy_tensors(adapter: Adapter, layout: Layout) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Return tensors and header metadata of a ComfyUI file; original names where drl knows them."""
    prefixes = {component: comfy_prefix(component) for component in adapter.components}
    tensors: dict[str, Tensor] = {}
    for component, layers in adapter.components.items():
        for name, layer in named_layers(layers, layout, component).items():
            key = prefixes[component] + name
            tensors |= _written(key, layer, ("lora_A.weight", "lora_B.weight"))
    return tensors, bundle_entry(adapter, prefixes)


def named_layers(layers: Layers, layout: Layout, component: str) -> dict[str, AdapterLayer]:
    """Return the layers under the names that kohya and ComfyUI use for this model.

    Original names, with fused layers, for models whose names drl knows; the model's own otherwise.
    Raises BadInput for a module that has no original name.
    """
    base = layout[component]
    places = {path: original_place(base.class_name, path) for path in base.weights}
    if not any(places.values()):
        return dict(layers)
    lost = sorted(path for path in layers if places[path] is None)
    if lost:
        raise BadInput(
            f"{name_list(lost)} of {component} have no place in the names that kohya and ComfyUI use for "
            f"{base.class_name}; use --format diffusers, peft or merged"
        )
    whole: dict[str, dict[int, str]] = defaultdict(dict)
    for path, place in places.items():
        if place is not None:
            whole[place.name][place.part] = path
    return {
        name: _joined([paths[part] for part in sorted(paths)], layers, base.weights)
        for name, paths in whole.items()
        if layers.keys() & paths.values()
    }


def _joined(
    paths: Sequence[str], layers: Layers, weights: Mapping[str, tuple[int, ...]]
) -> AdapterLayer:
    if len(paths) == 1:
        return layers[paths[0]]
    return fuse([layers.get(path) for path in paths], [weights[path][0] for path in paths])


def _written(key: str, layer: AdapterLayer, endings: tuple[str, str]) -> dict[str, Tensor]:
    # Alpha stays float32 whatever the matrices are: rounding it would change the strength.
    return {
        f"{key}.{endings[0]}": layer.A,
        f"{key}.{endings[1]}": layer.B,
        f"{key}.alpha": torch.tensor(layer.alpha, dtype=torch.float32),
    }


def _dimensions(adapter: Adapter) -> dict[str, str]:
    """Return rank and alpha as sd-scripts shows them; "Dynamic" when they differ."""
    layers = [layer for one in adapter.components.values() for layer in one.values()]
    return {
        "ss_network_dim": _uniform(layer.rank for layer in layers),
        "ss_network_alpha": _uniform(layer.alpha for layer in layers),
    }


def _uniform(values: Iterable[float]) -> str:
    found = set(values)
    return f"{found.pop():g}" if len(found) == 1 else "Dynamic"

"""diffusers' single file, ``pytorch_lora_weights.safetensors``: reading every generation, writing today's.

Keys are ``<component>.<path>.lora_A.weight``, or without the component when one model saved itself. The
strength is in the header entry ``lora_adapter_metadata``, a LoRA config whose keys have the tensors'
prefix; without it diffusers runs an adapter at scale 1 (lora.md 3.3). Older files spell the matrices
``.lora.down.weight`` and ``.lora.up.weight``, or ``.processor.to_q_lora.down.weight``.
"""

from __future__ import annotations

import json
import re
import warnings
from collections.abc import Iterable, Mapping
from typing import Any

from torch import Tensor

from drl.errors import BadInput
from drl.formats.adapter import Adapter, AdapterLayer, config_of, layers_of_state, state_of_layers
from drl.formats.names import COMPONENT, DENOISERS
from drl.formats.single_file import bundle_entry, bundle_of
from drl.lora import LoraConfig, LoraError
from drl.lora.errors import name_list
from drl.lora.naming import PEFT_PREFIX, adapter_key
from drl.lora.peft_config import config_fields, parse_config
from drl.lora.peft_tensors import check_pairs

FILE = "pytorch_lora_weights.safetensors"
METADATA = "lora_adapter_metadata"
OLD_PROCESSOR = re.compile(r"(.*)\.processor\.(to_[qkv]|to_out|add_[kqv]_proj|to_add_out)_lora")
MATRIX = re.compile(r"(.*)\.(?:lora_(A|B)\.weight|(?:lora\.)?(down|up)\.weight|(alpha))")


def component_of_key(key: str) -> str | None:
    """Return the component that a key starts with, or None."""
    first = key.partition(".")[0]
    return first if COMPONENT.fullmatch(first) else None


def prefix_of(keys: Iterable[str]) -> tuple[str, ...]:
    """Return the component prefixes of a file's keys, () when not all of them have one."""
    found = dict.fromkeys(component_of_key(key) for key in keys)
    return () if None in found else tuple(f"{name}." for name in found)


def read_diffusers(
    tensors: Mapping[str, Tensor], metadata: Mapping[str, str], *, component: str | None = None
) -> Adapter:
    """Turn the tensors of a diffusers file into an adapter.

    ``component``: what a file without component prefixes belongs to, "transformer" unless given. Every
    key is used or BadInput names it. Without metadata or alpha the scale is 1, with a warning.
    """
    prefixes = {name: name.removesuffix(".") for name in prefix_of(tensors)}
    if not prefixes:
        bare = PEFT_PREFIX if all(key.startswith(PEFT_PREFIX) for key in tensors) else ""
        prefixes = {bare: component or DENOISERS[0]}
    fields = metadata_fields(metadata)
    components: dict[str, Mapping[str, AdapterLayer]] = {}
    configs: dict[str, LoraConfig] = {}
    others: dict[str, Mapping[str, Tensor]] = {}
    base_model: str | None = None
    for prefix, name in prefixes.items():
        mine = {k.removeprefix(prefix): t for k, t in tensors.items() if k.startswith(prefix)}
        described = {
            key.removeprefix(prefix): value
            for key, value in fields.items()
            if key.startswith(prefix)
        }
        config = _config(described)
        state, alphas = state_of_keys(mine)
        if config is None:
            components[name] = _layers_without_config(state, alphas)
            continue
        if alphas:
            raise BadInput(
                f"{name}: the file gives the strength twice, in its metadata and as {len(alphas)} alpha "
                "tensors; remove one of them"
            )
        base_model = base_model or described.get("base_model_name_or_path")
        _check_ranks(state, config)
        components[name], others[name] = layers_of_state(state, config)
        configs[name] = config
    value = bundle_of(metadata).get("boundary_ratio")
    return Adapter(
        components=components,
        configs=configs,
        others={name: extra for name, extra in others.items() if extra},
        base_model=base_model,
        boundary_ratio=float(value) if isinstance(value, int | float) else None,
    )


def metadata_fields(metadata: Mapping[str, str]) -> dict[str, Any]:
    """Return the config in a header, keys as they are there; empty when there is none."""
    text = metadata.get(METADATA)
    if text is None:
        return {}
    try:
        fields = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise BadInput(f"the header entry {METADATA} is no JSON ({error})") from error
    if not isinstance(fields, dict):
        raise BadInput(f"the header entry {METADATA} holds a JSON {type(fields).__name__}")
    return fields


def _config(fields: Mapping[str, Any]) -> LoraConfig | None:
    if not fields:
        return None
    try:
        return parse_config({"peft_type": "LORA", **fields})
    except LoraError as error:
        raise BadInput(f"{METADATA}: {error}") from error


def state_of_keys(tensors: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Return the matrices by key of a PEFT file, and the alphas by module path.

    Takes the keys of every generation of diffusers; BadInput names those of none.
    """
    state: dict[str, Tensor] = {}
    alphas: dict[str, Tensor] = {}
    strange = []
    for key, tensor in tensors.items():
        match = MATRIX.fullmatch(key)
        if match is None:
            strange.append(key)
            continue
        stem, new, old, alpha = match.groups()
        path = _modern(stem)
        if alpha:
            alphas[path] = tensor
        else:
            matrix = f"lora_{new}" if new else {"down": "lora_A", "up": "lora_B"}[old]
            state[adapter_key(path, matrix)] = tensor
    if strange or len(state) + len(alphas) < len(tensors):
        raise BadInput(
            f"keys that belong to no LoRA pair: {name_list(sorted(strange)) or 'a module twice'}; expected "
            "<component>.<path>.lora_A.weight and .lora_B.weight. DoRA and biases are not supported here"
        )
    return state, alphas


def _modern(stem: str) -> str:
    """Return a module path without the spelling of attention processors."""
    match = OLD_PROCESSOR.fullmatch(stem)
    if match is None:
        return stem.removesuffix(".lora")
    path = f"{match.group(1)}.{match.group(2)}"
    return f"{path}.0" if match.group(2) == "to_out" else path


def _layers_without_config(
    state: Mapping[str, Tensor], alphas: Mapping[str, Tensor]
) -> dict[str, AdapterLayer]:
    paths = list(dict.fromkeys(key.rsplit(".", 2)[0] for key in state))
    keys = {adapter_key(path, matrix) for path in paths for matrix in ("lora_A", "lora_B")}
    lost = sorted(keys - set(state)) + sorted(set(alphas) - set(paths))
    if lost:
        raise BadInput(f"modules without both matrices: {name_list(lost)}; copy the file again")
    if len(alphas) < len(paths):
        warnings.warn(
            f"{len(paths) - len(alphas)} of {len(paths)} modules have no alpha and the header has no "
            f"{METADATA}; they run at scale 1.0, as in diffusers",
            stacklevel=4,
        )
    layers = {}
    for path in paths:
        A, B = state[adapter_key(path, "lora_A")], state[adapter_key(path, "lora_B")]
        alpha = float(alphas[path]) if path in alphas else float(A.shape[0])
        layers[path] = AdapterLayer(A=A, B=B, alpha=alpha)
    return layers


def _check_ranks(state: Mapping[str, Tensor], config: LoraConfig) -> None:
    try:
        check_pairs(state, config)
    except LoraError as error:
        raise BadInput(str(error)) from error


def refuse_others(adapter: Adapter, what: str) -> None:
    """Raise BadInput when an adapter has trained tensors that a format cannot hold."""
    lost = [f"{name}.{key}" for name, extra in adapter.others.items() for key in extra]
    if lost:
        raise BadInput(
            f"{what} holds LoRA matrices only; this adapter also trained {name_list(lost)} (bias or "
            "modules_to_save). Use --format peft or merged"
        )


def diffusers_tensors(adapter: Adapter) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Return tensors and header metadata of a diffusers file, every component under its name."""
    refuse_others(adapter, "a diffusers file")
    tensors: dict[str, Tensor] = {}
    described: dict[str, Any] = {}
    for component, layers in adapter.components.items():
        config = config_of(adapter, component)
        fields = config_fields(config, tuple(layers), base_model=adapter.base_model)
        described |= {f"{component}.{key}": value for key, value in fields.items()}
        state = state_of_layers(layers)
        tensors |= {f"{component}.{key}": tensor for key, tensor in state.items()}
    text = json.dumps(described, indent=2, sort_keys=True)
    prefixes = {component: f"{component}." for component in adapter.components}
    return tensors, {METADATA: text, **bundle_entry(adapter, prefixes)}

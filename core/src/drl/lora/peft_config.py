"""`adapter_config.json` to `LoraConfig` and back (lora.md 3.1).

Reading sorts every key into one of four groups: read; harmless; touching only how an adapter
starts (a warning); changing what the adapter computes (an error unless at its default).
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from drl.lora.config import ALL_LINEAR, LoraConfig, Number, pattern_value
from drl.lora.errors import AdapterNotFound, LoraError, name_list, shown

CONFIG_FILE = "adapter_config.json"

READ = frozenset(
    {
        "peft_type",
        "r",
        "lora_alpha",
        "lora_dropout",
        "target_modules",
        "exclude_modules",
        "init_lora_weights",
        "rank_pattern",
        "alpha_pattern",
        "use_rslora",
        "bias",
        "modules_to_save",
        "layers_to_transform",
        "layers_pattern",
    }
)
HARMLESS = frozenset(
    {
        "task_type",
        "auto_mapping",
        "peft_version",
        "base_model_name_or_path",
        "revision",
        "inference_mode",
        "megatron_core",
        "qalora_group_size",
    }
)
ONLY_INIT = frozenset(
    {"loftq_config", "eva_config", "corda_config", "lora_ga_config", "ensure_weight_tying"}
)
# Anything but the "off" values of a field here makes the adapter compute something else.
CHANGES_FUNCTION = frozenset(
    {
        "use_dora",
        "lora_bias",
        "fan_in_fan_out",
        "layer_replication",
        "target_parameters",
        "trainable_token_indices",
        "megatron_config",
        "alora_invocation_tokens",
        "use_qalora",
        "use_bdlora",
        "velora_config",
        "monteclora_config",
        "arrow_config",
        "kasa_config",
    }
)
NEVER_NULL = ("r", "lora_alpha", "lora_dropout", "use_rslora", "bias", "init_lora_weights")
PRIVATE_BLOCK = "veomni_lora"

# How an adapter started says nothing about a trained one. PEFT runs the start again when it loads,
# and refuses "orthogonal" for convolutions and in older versions, so that one is written as true.
PEFT_INIT = {"gaussian": "gaussian", "kaiming-uniform": True, "random": False, "orthogonal": True}
# Start values that left the base weight alone: a stored adapter no longer depends on them.
DATA_INITS = ("eva", "mica")


def read_config(directory: Path) -> LoraConfig:
    """Read ``adapter_config.json`` of a PEFT directory.

    Raises ``AdapterNotFound`` when there is none, ``LoraError`` for anything that cannot be used,
    naming the field. Missing fields take PEFT's defaults (r 8, lora_alpha 8).
    """
    path = directory / CONFIG_FILE
    fields = _read_object(path)
    try:
        return parse_config(fields)
    except LoraError as error:
        raise LoraError(f"{path}: {error}") from error


def parse_config(fields: Mapping[str, Any]) -> LoraConfig:
    """Turn the fields of an ``adapter_config.json`` into a ``LoraConfig``; see ``read_config``."""
    _check_kind(fields)
    _check_fields(fields)
    read = {key: value for key, value in fields.items() if key in READ - {"peft_type"}}
    init = fields.get("init_lora_weights", True)
    return LoraConfig.from_fields({**read, "init_lora_weights": _init_from_peft(init)})


def config_fields(
    config: LoraConfig, fqns: Collection[str], *, base_model: str | None
) -> dict[str, Any]:
    """Return the JSON fields for ``config`` with the adapted module paths ``fqns``.

    Only long-lived keys, so that old readers take them too; these are also valid arguments of
    PEFT's ``LoraConfig``. ``all-linear`` is written as the resolved paths.
    """
    rank_pattern, alpha_pattern = stable_patterns(config, fqns)
    layers: dict[str, Any] = {}
    if config.layers_to_transform is not None:
        layers["layers_to_transform"] = list(config.layers_to_transform)
    if config.layers_pattern:
        layers["layers_pattern"] = list(config.layers_pattern)
    return {
        "peft_type": "LORA",
        "r": config.rank,
        "lora_alpha": config.alpha,
        "lora_dropout": config.dropout,
        "bias": config.bias,
        "use_rslora": config.use_rslora,
        "init_lora_weights": PEFT_INIT[config.init],
        "target_modules": _written_targets(config, fqns),
        "exclude_modules": _written_spec(config.exclude_modules) or None,
        "target_parameters": None,
        "modules_to_save": sorted(config.modules_to_save) or None,
        **layers,
        "rank_pattern": rank_pattern,
        "alpha_pattern": alpha_pattern,
        "task_type": None,
        "base_model_name_or_path": base_model,
        "fan_in_fan_out": False,
        "inference_mode": True,
        "use_dora": False,
    }


def stable_patterns(
    config: LoraConfig, fqns: Collection[str]
) -> tuple[dict[str, int], dict[str, float]]:
    """Return the patterns such that sorting their keys changes no module's rank or alpha.

    PEFT writes keys sorted, and the first match wins, so overlapping keys can change meaning on a
    save. When they would, one exact key per deviating module replaces them.
    """
    return (
        _stable(config.rank_pattern, fqns, config.rank),
        _stable(config.alpha_pattern, fqns, config.alpha),
    )


def _read_object(path: Path) -> dict[str, Any]:
    try:
        fields = json.loads(path.read_text(encoding="utf-8"))
    except (FileNotFoundError, NotADirectoryError) as error:
        raise AdapterNotFound(
            f"{path} does not exist; an adapter directory holds {CONFIG_FILE} and its weights"
        ) from error
    except (OSError, ValueError, RecursionError) as error:
        raise LoraError(
            f"{path} is invalid JSON ({error}); save the adapter again or copy it completely"
        ) from error
    if not isinstance(fields, dict):
        raise LoraError(f"{path} holds a JSON {type(fields).__name__}; it must be an object")
    return fields


def _check_kind(fields: Mapping[str, Any]) -> None:
    kind = fields.get("peft_type")
    if kind != "LORA":
        given = "missing" if "peft_type" not in fields else shown(kind)
        raise LoraError(f'peft_type is {given}, not "LORA"; only LoRA adapters can be read')


def _check_fields(fields: Mapping[str, Any]) -> None:
    on = [key for key in CHANGES_FUNCTION if _is_set(fields.get(key))]
    if on:
        listed = name_list(f"{key} = {shown(fields[key])}" for key in sorted(on))
        raise LoraError(
            f"not supported, and ignoring it would change what the adapter computes: {listed}"
        )
    null = [key for key in NEVER_NULL if key in fields and fields[key] is None]
    if null:
        raise LoraError(f"{name_list(null)} must not be null; leave the field out for its default")
    if _private_mode(fields) is not None:
        raise LoraError(f"{PRIVATE_BLOCK}.moe_mode is set: expert adapters are not supported")
    tuned = sorted(key for key in ONLY_INIT if _is_set(fields.get(key)))
    if tuned:
        warnings.warn(f"fields about initialisation are ignored: {name_list(tuned)}", stacklevel=5)
    known = READ | HARMLESS | ONLY_INIT | CHANGES_FUNCTION | {PRIVATE_BLOCK}
    unknown = sorted(set(fields) - known)
    if unknown:
        warnings.warn(f"unknown fields are ignored: {name_list(unknown)}", stacklevel=5)


def _is_set(value: object) -> bool:
    # Not by truth: 0 may be a setting.
    return value is not None and value is not False and value not in ([], {})


def _private_mode(fields: Mapping[str, Any]) -> object:
    block = fields.get(PRIVATE_BLOCK)
    return block.get("moe_mode") if isinstance(block, dict) else block


def _init_from_peft(value: object) -> object:
    if value in DATA_INITS:
        warnings.warn(
            f"init_lora_weights = {shown(value)} only says how training started; a fresh adapter "
            'from this config would start as "kaiming-uniform"',
            stacklevel=5,
        )
        return True
    if not isinstance(value, bool | str) and value is not None:
        raise LoraError(f"init_lora_weights is {shown(value)}; it must be true, false or a name")
    return value


def _written_targets(config: LoraConfig, fqns: Collection[str]) -> list[str] | str:
    if config.target_modules == ALL_LINEAR:
        return sorted(fqns)
    return _written_spec(config.target_modules)


def _written_spec(spec: tuple[str, ...] | str) -> list[str] | str:
    return spec if isinstance(spec, str) else sorted(spec)


def _stable(
    pattern: Mapping[str, Number], fqns: Collection[str], default: Number
) -> dict[str, Number]:
    resorted = dict(sorted(pattern.items()))
    values = {fqn: pattern_value(pattern, fqn, default) for fqn in fqns}
    if all(pattern_value(resorted, fqn, default) == value for fqn, value in values.items()):
        return resorted
    return {_exact(fqn): value for fqn, value in values.items() if value != default}


def _exact(fqn: str) -> str:
    return "^" + fqn.replace(".", r"\.")

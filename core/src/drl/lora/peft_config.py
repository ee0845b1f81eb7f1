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
        "layers_to_transform",
        "layers_pattern",
        "modules_to_save",
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
PRIVATE_BLOCK = "veomni_lora"

PEFT_INIT = {"gaussian": "gaussian", "kaiming-uniform": True}
# Start values that left the base weight alone: a stored adapter no longer depends on them.
BASE_KEEPING_INITS = ("orthogonal", "eva", "mica")


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
    return LoraConfig(
        rank=fields.get("r", 8),
        alpha=fields.get("lora_alpha", 8),
        target_modules=fields.get("target_modules") or (),
        init=_init_from_peft(fields.get("init_lora_weights", True)),
        dropout=fields.get("lora_dropout", 0.0),
        exclude_modules=fields.get("exclude_modules") or (),
        rank_pattern=_or_empty(fields.get("rank_pattern")),
        alpha_pattern=_or_empty(fields.get("alpha_pattern")),
        use_rslora=fields.get("use_rslora", False),
    )


def config_fields(
    config: LoraConfig, fqns: Collection[str], *, base_model: str | None
) -> dict[str, Any]:
    """Return the JSON fields for ``config`` with the adapted module paths ``fqns``.

    Only long-lived keys, so that old readers take them too; these are also valid arguments of
    PEFT's ``LoraConfig``. ``all-linear`` is written as the resolved paths.
    """
    rank_pattern, alpha_pattern = stable_patterns(config, fqns)
    return {
        "peft_type": "LORA",
        "r": config.rank,
        "lora_alpha": config.alpha,
        "lora_dropout": config.dropout,
        "bias": "none",
        "use_rslora": config.use_rslora,
        "init_lora_weights": PEFT_INIT[config.init],
        "target_modules": _written_targets(config, fqns),
        "exclude_modules": _written_spec(config.exclude_modules) or None,
        "target_parameters": None,
        "modules_to_save": None,
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
    bias = fields.get("bias", "none")
    if bias not in ("none", "all", "lora_only"):
        raise LoraError(f"bias is {shown(bias)}; it must be none, all or lora_only")
    if bias != "none":
        raise LoraError(f'bias is "{bias}": trained biases are not supported; train with bias none')


def _check_fields(fields: Mapping[str, Any]) -> None:
    on = [key for key in CHANGES_FUNCTION if _is_set(fields.get(key))]
    if on:
        listed = name_list(f"{key} = {shown(fields[key])}" for key in sorted(on))
        raise LoraError(
            f"not supported, and ignoring it would change what the adapter computes: {listed}"
        )
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
    # Not by truth or equality: layers_to_transform = 0 means layer 0.
    return value is not None and value is not False and value not in ([], {})


def _private_mode(fields: Mapping[str, Any]) -> object:
    block = fields.get(PRIVATE_BLOCK)
    return block.get("moe_mode") if isinstance(block, dict) else block


def _init_from_peft(value: object) -> str:
    if value is True:
        return "kaiming-uniform"
    if value == "gaussian":
        return "gaussian"
    if value is False or value in BASE_KEEPING_INITS:
        warnings.warn(
            f"init_lora_weights = {shown(value)} only says how training started; a fresh adapter "
            'from this config would start as "kaiming-uniform"',
            stacklevel=5,
        )
        return "kaiming-uniform"
    raise LoraError(
        f"init_lora_weights is {shown(value)}: schemes such as pissa, olora, corda, lora_ga and "
        "loftq change the base weights, which the file does not hold. Convert the adapter with "
        "PEFT (save_pretrained(path_initial_model_for_weight_conversion=...)) and load the result"
    )


def _or_empty(value: Any) -> Any:
    return {} if value is None else value


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

"""Checks of the single values of a ``LoraConfig``; each raises ``LoraError`` that names the field."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from typing import Any

from drl.lora.errors import LoraError, shown
from drl.lora.init import BASE_SCHEMES, INIT_SCHEMES

ALL_LINEAR = "all-linear"
BIASES = ("none", "all", "lora_only")
# Far above any real rank; keeps a corrupt file from asking for terabytes.
LARGEST_RANK = 1_000_000


def check_rank(where: str, value: object) -> None:
    """Refuse what is no integer from 1 to ``LARGEST_RANK``."""
    is_int = isinstance(value, int) and not isinstance(value, bool)
    if not is_int or not 0 < value <= LARGEST_RANK:  # type: ignore[operator]
        raise LoraError(
            f"{where} (r) is {shown(value)}; it must be an integer from 1 to {LARGEST_RANK}"
        )


def check_alpha(where: str, value: object) -> None:
    """Refuse what is no finite number, and negative ones."""
    if not _is_number(value) or value < 0:  # type: ignore[operator]
        raise LoraError(
            f"{where} (lora_alpha) is {shown(value)}; it must be a finite number, usually 1 to 2 "
            "times the rank"
        )


def check_choices(init: object, dropout: object, bias: object, use_rslora: object) -> None:
    """Refuse values outside the choices of these four fields."""
    if not isinstance(init, str) or init not in (*INIT_SCHEMES, *BASE_SCHEMES):
        raise LoraError(_init_message(init))
    if not _is_number(dropout) or not 0 <= dropout < 1:  # type: ignore[operator]
        raise LoraError(
            f"dropout (lora_dropout) is {shown(dropout)}; it must be a number in [0, 1)"
        )
    if not isinstance(bias, str) or bias not in BIASES:
        raise LoraError(f"bias is {shown(bias)}; it must be none, all or lora_only")
    if not isinstance(use_rslora, bool):
        raise LoraError(f"use_rslora is {shown(use_rslora)}; it must be true or false")


def _init_message(init: object) -> str:
    known = ", ".join(sorted((*INIT_SCHEMES, *BASE_SCHEMES)))
    message = f"init (init_lora_weights) is {shown(init)}; it must be one of {known}"
    if isinstance(init, str) and init.startswith("pissa_niter_"):
        return (
            f"{message}. The start of {shown(init)} is a random decomposition that cannot be "
            "rebuilt from the file, so the adapter would compute something else; take pissa, or "
            "convert the adapter with PEFT "
            "(save_pretrained(path_initial_model_for_weight_conversion=...))"
        )
    return f"{message}. Schemes that need data or quantised weights are not supported"


def check_layers(
    targets: tuple[str, ...] | str, layers: tuple[int, ...] | None, pattern: tuple[str, ...]
) -> None:
    """Apply PEFT's rules of ``layers_to_transform`` and ``layers_pattern`` (lora.md 1.2)."""
    if layers is not None and isinstance(targets, str):
        raise LoraError(
            f"layers_to_transform needs a list of target_modules, not {shown(targets)}; write the "
            "layer numbers into the regular expression instead"
        )
    if pattern and layers is None:
        raise LoraError(
            "layers_pattern names the list that layers_to_transform counts in; give both, or none"
        )


def check_orthogonal(rank: int, rank_pattern: Mapping[str, int]) -> None:
    """Refuse odd ranks: A and B start in two halves of the rank."""
    odd = sorted({value for value in (rank, *rank_pattern.values()) if value % 2})
    if odd:
        raise LoraError(f'init = "orthogonal" needs even ranks (r, rank_pattern), got {odd}')


def targets(value: object) -> tuple[str, ...] | str:
    """Return ``target_modules`` in its stored form."""
    if isinstance(value, str) and value.lower() == ALL_LINEAR:
        return ALL_LINEAR
    if not value:
        raise LoraError(
            "target_modules is empty, so no module would be adapted; name at least one module "
            f'suffix such as "to_q", or "{ALL_LINEAR}"'
        )
    return module_spec("target_modules", value)


def module_spec(where: str, value: object) -> tuple[str, ...] | str:
    """Return names as a tuple, and a regular expression as it is."""
    if isinstance(value, str):
        check_regex(where, value)
        return value
    if not isinstance(value, tuple | list) or not all(isinstance(e, str) and e for e in value):
        raise LoraError(
            f"{where} is {shown(value)}; it must be a tuple of module names, or one str that is a "
            "regular expression over the whole module path"
        )
    return tuple(value)


def names(where: str, value: object) -> tuple[str, ...]:
    """Return names as a tuple; a single str is one name."""
    listed = (value,) if isinstance(value, str) and value else value
    if not isinstance(listed, tuple | list) or not all(isinstance(e, str) and e for e in listed):
        raise LoraError(f"{where} is {shown(value)}; it must be a list of module names")
    for entry in listed:
        check_regex(where, rf"(^|.*\.){entry}($|\..*)")
    return tuple(dict.fromkeys(listed))


def layer_indices(value: object) -> tuple[int, ...] | None:
    """Return layer numbers as a tuple; a single number is one layer, an empty list means all."""
    listed = (value,) if isinstance(value, int) and not isinstance(value, bool) else value
    if listed is None or (isinstance(listed, tuple | list) and not listed):
        return None
    if not isinstance(listed, tuple | list) or not all(type(e) is int and e >= 0 for e in listed):
        raise LoraError(
            f"layers_to_transform is {shown(value)}; it must be a layer number from 0 on, or a "
            "list of them"
        )
    return tuple(dict.fromkeys(listed))


def pattern_of_numbers(
    where: str, value: object, check: Callable[[str, object], None]
) -> dict[str, Any]:
    """Return a pattern as a dict in its own order."""
    if not isinstance(value, Mapping):
        raise LoraError(f"{where} is {shown(value)}; it must map module patterns to numbers")
    for key, entry in value.items():
        if not isinstance(key, str):
            raise LoraError(f"{where} has the key {shown(key)}; keys must be module patterns")
        check_regex(f"{where} key", rf"(.*\.)?({key})$")
        check(f'{where}["{key}"]', entry)
    return dict(value)


def check_regex(where: str, expression: str) -> None:
    """Raise ``LoraError`` when ``expression`` does not compile."""
    try:
        re.compile(expression)
    except (re.error, OverflowError, RecursionError) as error:
        raise LoraError(
            f"{where} {shown(expression)} is no valid regular expression ({error}); escape "
            "special characters with a backslash"
        ) from error


def _is_number(value: object) -> bool:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    try:
        return math.isfinite(value)
    except OverflowError:  # an int beyond the range of floats
        return False

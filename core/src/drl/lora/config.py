"""`LoraConfig`: what is adapted, how strongly, and how it starts.

Field meanings follow PEFT (lora.md 1), so that a config read from an adapter directory means the
same here. Per-module ranks and alphas use PEFT's pattern rule (lora.md 1.4).
"""

from __future__ import annotations

import math
import re
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TypeVar

from drl.lora.errors import LoraError, shown
from drl.lora.init import INIT_SCHEMES

ALL_LINEAR = "all-linear"
# Far above any real rank; keeps a corrupt file from asking for terabytes.
LARGEST_RANK = 1_000_000

Number = TypeVar("Number", int, float)


@dataclass(frozen=True, slots=True, kw_only=True)
class LoraConfig:
    """Settings of one adapter.

    ``rank``: inner size r. ``alpha``: numerator of the scale ``alpha / r`` (a float is fine).
    ``target_modules``: a tuple of names matched as suffixes on whole path components, a str that
    must match the whole path as a regular expression, or ``"all-linear"``; ``exclude_modules``
    takes the first two forms and wins. ``init``: ``"gaussian"`` (A ~ N(0, 1/r²), standard
    deviation 1/r) or ``"kaiming-uniform"`` (PEFT's default). ``dropout``: on the adapter's input,
    in training mode only. ``rank_pattern`` and ``alpha_pattern``: per-module values, first key
    that matches wins. ``use_rslora``: scale ``alpha / sqrt(r)``.

    Raises ``LoraError`` for a value outside its range; warns when alpha is 0.
    """

    rank: int
    alpha: float
    target_modules: tuple[str, ...] | str
    init: str = "gaussian"
    dropout: float = 0.0
    exclude_modules: tuple[str, ...] | str = ()
    rank_pattern: Mapping[str, int] = field(default_factory=dict, hash=False)
    alpha_pattern: Mapping[str, float] = field(default_factory=dict, hash=False)
    use_rslora: bool = False

    def __post_init__(self) -> None:
        _check_rank("rank", self.rank)
        _check_alpha("alpha", self.alpha)
        _check_choices(self)
        object.__setattr__(self, "target_modules", _targets(self.target_modules))
        exclude = _module_spec("exclude_modules", self.exclude_modules)
        object.__setattr__(self, "exclude_modules", exclude)
        object.__setattr__(self, "rank_pattern", _pattern("rank_pattern", self.rank_pattern))
        object.__setattr__(self, "alpha_pattern", _pattern("alpha_pattern", self.alpha_pattern))
        if self.alpha == 0:
            warnings.warn("alpha is 0: the adapter's scale is 0, it has no effect", stacklevel=3)

    def rank_of(self, fqn: str) -> int:
        """Return the rank of the module at this path."""
        return pattern_value(self.rank_pattern, fqn, self.rank)

    def alpha_of(self, fqn: str) -> float:
        """Return the alpha of the module at this path."""
        return pattern_value(self.alpha_pattern, fqn, self.alpha)

    def scale_of(self, fqn: str) -> float:
        """Return alpha / r, or alpha / sqrt(r) under rsLoRA, with the module's own r and alpha."""
        rank = self.rank_of(fqn)
        return self.alpha_of(fqn) / (math.sqrt(rank) if self.use_rslora else rank)


def matching_key(pattern: Mapping[str, object], fqn: str) -> str | None:
    """Return the first key that matches the end of ``fqn`` from a component boundary on.

    A key is a regular expression: ``(.*\\.)?(key)$`` must match from the start (lora.md 1.4).
    """
    return next((key for key in pattern if re.match(rf"(.*\.)?({key})$", fqn)), None)


def pattern_value(pattern: Mapping[str, Number], fqn: str, default: Number) -> Number:
    """Return the value of the first key that matches ``fqn``, or ``default``."""
    key = matching_key(pattern, fqn)
    return default if key is None else pattern[key]


def _is_number(value: object) -> bool:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    try:
        return math.isfinite(value)
    except OverflowError:  # an int beyond the range of floats
        return False


def _check_rank(where: str, value: object) -> None:
    is_int = isinstance(value, int) and not isinstance(value, bool)
    if not is_int or not 0 < value <= LARGEST_RANK:  # type: ignore[operator]
        raise LoraError(
            f"{where} (r) is {shown(value)}; it must be an integer from 1 to {LARGEST_RANK}"
        )


def _check_alpha(where: str, value: object) -> None:
    if not _is_number(value) or value < 0:  # type: ignore[operator]
        raise LoraError(
            f"{where} (lora_alpha) is {shown(value)}; it must be a finite number, usually 1 to 2 "
            "times the rank"
        )


def _check_choices(config: LoraConfig) -> None:
    if not isinstance(config.init, str) or config.init not in INIT_SCHEMES:
        raise LoraError(
            f"init is {shown(config.init)}; it must be one of {', '.join(sorted(INIT_SCHEMES))}"
        )
    if not _is_number(config.dropout) or not 0 <= config.dropout < 1:
        raise LoraError(
            f"dropout (lora_dropout) is {shown(config.dropout)}; it must be a number in [0, 1)"
        )
    if not isinstance(config.use_rslora, bool):
        raise LoraError(f"use_rslora is {shown(config.use_rslora)}; it must be true or false")


def _targets(value: object) -> tuple[str, ...] | str:
    if isinstance(value, str) and value.lower() == ALL_LINEAR:
        return ALL_LINEAR
    if not value:
        raise LoraError(
            "target_modules is empty, so no module would be adapted; name at least one module "
            f'suffix such as "to_q", or "{ALL_LINEAR}"'
        )
    return _module_spec("target_modules", value)


def _module_spec(where: str, value: object) -> tuple[str, ...] | str:
    if isinstance(value, str):
        check_regex(where, value)
        return value
    if not isinstance(value, tuple | list) or not all(isinstance(e, str) and e for e in value):
        raise LoraError(
            f"{where} is {shown(value)}; it must be a tuple of module names, or one str that is a "
            "regular expression over the whole module path"
        )
    return tuple(value)


def _pattern(where: str, value: object) -> dict[str, int | float]:
    if not isinstance(value, Mapping):
        raise LoraError(f"{where} is {shown(value)}; it must map module patterns to numbers")
    for key, entry in value.items():
        if not isinstance(key, str):
            raise LoraError(f"{where} has the key {shown(key)}; keys must be module patterns")
        check_regex(f"{where} key", rf"(.*\.)?({key})$")
        check = _check_rank if where == "rank_pattern" else _check_alpha
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

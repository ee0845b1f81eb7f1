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
from typing import Any, TypeVar

from drl.lora.checks import (
    ALL_LINEAR,
    check_alpha,
    check_choices,
    check_layers,
    check_orthogonal,
    check_rank,
    layer_indices,
    module_spec,
    names,
    pattern_of_numbers,
    targets,
)
from drl.lora.fields import canonical
from drl.lora.init import BASE_SCHEMES

__all__ = ["ALL_LINEAR", "LoraConfig", "Number", "matching_key", "pattern_value"]

Number = TypeVar("Number", int, float)


@dataclass(frozen=True, slots=True, kw_only=True)
class LoraConfig:
    """Settings of one adapter.

    ``rank``: inner size r. ``alpha``: numerator of the scale ``alpha / r`` (a float is fine).
    ``target_modules``: a tuple of names matched as suffixes on whole path components, a str that
    must match the whole path as a regular expression, or ``"all-linear"``; ``exclude_modules``
    takes the first two forms and wins. ``init``: see ``drl.lora.init``. ``dropout``: on the
    adapter's input, in training mode only. ``rank_pattern`` and ``alpha_pattern``: per-module
    values, first key that matches wins. ``use_rslora``: scale ``alpha / sqrt(r)``. ``bias``: which
    biases train too: ``"none"``, ``"all"`` of the model, or those of adapted layers
    (``"lora_only"``). ``modules_to_save``: suffixes of modules that are trained in full beside the
    adapter. ``layers_to_transform``: adapt only blocks with these numbers; ``layers_pattern``: name
    of the list that the numbers count in.

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
    bias: str = "none"
    modules_to_save: tuple[str, ...] = ()
    layers_to_transform: tuple[int, ...] | None = None
    layers_pattern: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        check_rank("rank", self.rank)
        check_alpha("alpha", self.alpha)
        check_choices(self.init, self.dropout, self.bias, self.use_rslora)
        checked = {
            "target_modules": targets(self.target_modules),
            "exclude_modules": module_spec("exclude_modules", self.exclude_modules),
            "rank_pattern": pattern_of_numbers("rank_pattern", self.rank_pattern, check_rank),
            "alpha_pattern": pattern_of_numbers("alpha_pattern", self.alpha_pattern, check_alpha),
            "modules_to_save": names("modules_to_save", self.modules_to_save),
            "layers_to_transform": layer_indices(self.layers_to_transform),
            "layers_pattern": names("layers_pattern", self.layers_pattern),
        }
        for key, value in checked.items():
            object.__setattr__(self, key, value)
        check_layers(self.target_modules, self.layers_to_transform, self.layers_pattern)
        if self.init == "orthogonal":
            check_orthogonal(self.rank, self.rank_pattern)
        if self.alpha == 0:
            warnings.warn("alpha is 0: the adapter's scale is 0, it has no effect", stacklevel=3)

    @classmethod
    def from_fields(cls, fields: Mapping[str, Any]) -> LoraConfig:
        """Build a config from names and values, in drl's spelling or in PEFT's.

        ``rank`` or ``r``, ``alpha`` or ``lora_alpha``, ``target_modules`` or ``lora_modules``,
        ``dropout`` or ``lora_dropout``, ``init`` or ``init_lora_weights``. A value of None counts
        as absent, and what is absent takes PEFT's default (rank 8, alpha 8, kaiming-uniform).
        Raises ``LoraError`` for an unknown name, for both spellings with different values, and for
        values outside their range.
        """
        return cls(**canonical(fields))

    @property
    def needs_base(self) -> bool:
        """True when A and B are relative to start values taken from the base weight (pissa, olora)."""
        return self.init in BASE_SCHEMES

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

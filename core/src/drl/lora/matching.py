"""Which modules a config adapts (PEFT's rules, lora.md 1.2).

``all-linear`` here means every ``nn.Linear``; PEFT also leaves out the output embedding of a
language model, which a diffusion transformer does not have (name it in ``exclude_modules``).
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable
from dataclasses import dataclass

from torch import nn

from drl.lora.config import ALL_LINEAR, LoraConfig
from drl.lora.errors import LoraError, name_list
from drl.lora.naming import to_plain_name


@dataclass(frozen=True, slots=True, kw_only=True)
class TargetMatch:
    """What a config matches in a model.

    ``linears``: plain fqn to module, in registration order. ``others``: matched modules of another
    class than ``nn.Linear``. ``unmatched``: config entries that hit no module at all.
    """

    linears: dict[str, nn.Linear]
    others: dict[str, nn.Module]
    unmatched: tuple[str, ...]


def matches(spec: tuple[str, ...] | str, fqn: str) -> bool:
    """Say whether a module path fits: a whole-path regex (str), or a suffix of whole components."""
    if isinstance(spec, str):
        return re.fullmatch(spec, fqn) is not None
    return any(_is_suffix(entry, fqn) for entry in spec)


def match_targets(module: nn.Module, config: LoraConfig) -> TargetMatch:
    """Collect the modules that ``config`` adapts in ``module``; changes nothing.

    Paths are those inside ``module``, without wrapper components. The root itself never matches.
    """
    named = {to_plain_name(name): child for name, child in module.named_modules() if name}
    targets = config.target_modules
    everything = targets == ALL_LINEAR
    hits = {
        fqn: child
        for fqn, child in named.items()
        if (isinstance(child, nn.Linear) if everything else matches(targets, fqn))
    }
    kept = {f: child for f, child in hits.items() if not matches(config.exclude_modules, f)}
    wanted = () if everything else targets
    return TargetMatch(
        linears={fqn: child for fqn, child in kept.items() if isinstance(child, nn.Linear)},
        others={fqn: child for fqn, child in kept.items() if not isinstance(child, nn.Linear)},
        unmatched=_unmatched(wanted, named) + _unmatched(config.exclude_modules, named),
    )


def check_match(match: TargetMatch, module: nn.Module) -> None:
    """Raise ``LoraError`` when an entry hit nothing, or hit something that is no ``nn.Linear``."""
    if match.unmatched:
        raise LoraError(_unmatched_message(match.unmatched, module))
    if match.others:
        listed = name_list(f"{fqn} ({type(m).__name__})" for fqn, m in match.others.items())
        raise LoraError(
            f"target_modules hits modules that are no nn.Linear: {listed}. Only Linear layers can "
            "be adapted; use longer names in target_modules, or list these in exclude_modules"
        )
    if not match.linears:
        raise LoraError(
            "no module matched: exclude_modules removes every module that target_modules names, or "
            f"{type(module).__name__} has no nn.Linear inside"
        )


def _is_suffix(entry: str, fqn: str) -> bool:
    return fqn == entry or fqn.endswith("." + entry)


def _unmatched(spec: tuple[str, ...] | str, names: Iterable[str]) -> tuple[str, ...]:
    entries: tuple[tuple[str, ...] | str, ...]
    entries = (spec,) if isinstance(spec, str) else tuple((entry,) for entry in spec)
    missed = [entry for entry in entries if not any(matches(entry, name) for name in names)]
    return tuple(entry if isinstance(entry, str) else entry[0] for entry in missed)


def _unmatched_message(entries: tuple[str, ...], module: nn.Module) -> str:
    linears = [to_plain_name(n) for n, m in module.named_modules() if isinstance(m, nn.Linear)]
    suffixes = {suffix for fqn in linears for suffix in _suffixes(fqn)}
    near = {n for entry in entries for n in difflib.get_close_matches(entry, suffixes, n=3)}
    hint = f"near names: {', '.join(sorted(near))}" if near else f"it has: {name_list(linears)}"
    quoted = name_list(f'"{entry}"' for entry in entries)
    return (
        f"no module matched {quoted} (target_modules or exclude_modules) in "
        f"{type(module).__name__}; {hint}. An entry of a list must equal the last components of a "
        "module path, a single str must match the whole path as a regular expression"
    )


def _suffixes(fqn: str) -> list[str]:
    components = fqn.split(".")
    return [".".join(components[at:]) for at in range(len(components))]

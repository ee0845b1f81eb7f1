"""The module tree of a model with adapters, seen as the model without them.

Paths are plain: without wrapper components (FSDP1, compile, recomputation) and without the parts
that adapters added.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import nn

from drl.lora.errors import LoraError, name_list
from drl.lora.layer import LoraLayer
from drl.lora.naming import WRAPPER_COMPONENTS, to_plain_name
from drl.lora.switches import BiasSwitch, Host, SavedModule


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """One module of the model without adapters, and what holds it now.

    ``module``: the module itself. ``parent`` and ``child``: whose attribute its ``host`` is, or the
    module where there is none. ``saved``: the copies of it that adapters train in full.
    """

    parent: nn.Module
    child: str
    module: nn.Module
    host: LoraLayer | BiasSwitch | None = None
    saved: SavedModule | None = None


def places(root: nn.Module) -> dict[str, Place]:
    """Return every module below ``root`` by plain path, in registration order."""
    found: dict[str, Place] = {}
    _collect(root, "", found)
    return found


def _collect(parent: nn.Module, prefix: str, found: dict[str, Place]) -> None:
    for child, module in parent.named_children():
        path = prefix if child in WRAPPER_COMPONENTS else f"{prefix}.{child}".lstrip(".")
        found[path] = _place(parent, child, module)
        _collect(found[path].module, path, found)


def _place(parent: nn.Module, child: str, module: nn.Module) -> Place:
    saved = None
    if isinstance(module, SavedModule):
        saved, parent, child, module = module, module, "original_module", module.original_module
    if isinstance(module, LoraLayer | BiasSwitch):
        return Place(parent=parent, child=child, module=module.base_layer, host=module, saved=saved)
    return Place(parent=parent, child=child, module=module, saved=saved)


def check_single_use(root: nn.Module, chosen: Iterable[str]) -> None:
    """Raise ``LoraError`` for a chosen module that the model uses in several places."""
    found = places(root)
    uses = Counter(id(module) for _, module in root.named_modules(remove_duplicate=False))
    for path in chosen:
        count = uses[id(found[path].module)]
        if count > 1:
            raise LoraError(
                f"{path} is one module used in {count} places, so adapting it here would change "
                "the others too; list it in exclude_modules"
            )


def hosts(root: nn.Module) -> list[tuple[str, Host]]:
    """Return whatever holds adapter tensors, with its plain path, in registration order."""
    return [
        (to_plain_name(name), module)
        for name, module in root.named_modules()
        if isinstance(module, LoraLayer | SavedModule | BiasSwitch)
    ]


def lora_layers(root: nn.Module) -> dict[str, LoraLayer]:
    """Return the layers with low-rank updates by plain path, in registration order."""
    return {path: host for path, host in hosts(root) if isinstance(host, LoraLayer)}


def adapter_names(root: nn.Module) -> tuple[str, ...]:
    """Return the names of the model's adapters, in the order of their first places in it."""
    return tuple(dict.fromkeys(name for _, host in hosts(root) for name in host.names))


def hosts_of(root: nn.Module, name: str) -> list[tuple[str, Host]]:
    """Return what holds tensors of one adapter; raises ``LoraError`` when the model lacks it."""
    found = [(path, host) for path, host in hosts(root) if name in host.names]
    if not found:
        known = adapter_names(root)
        has = f"it has {name_list(known)}" if known else "call inject or load_peft first"
        missing = f' called "{name}"' if known else ""
        raise LoraError(f"the module has no adapters{missing}; {has}")
    return found


def base_names(root: nn.Module) -> dict[str, str]:
    """Map each key of ``root.state_dict()`` that is no adapter tensor to its plain name.

    The plain names are the keys of the model before ``inject``: what a checkpoint of it has.
    """
    parts = {
        f"{_without_wrappers(name)}.{part}."
        for name, module in root.named_modules()
        if isinstance(module, LoraLayer | SavedModule | BiasSwitch)
        for part, _ in module.named_children()
        if part not in ("base_layer", "original_module")
    }
    return {key: to_plain_name(key) for key in root.state_dict() if not _is_below(key, parts)}


def base_state(module: nn.Module) -> dict[str, torch.Tensor]:
    """Return the state of a module as it was without adapters, by plain name; memory is shared."""
    if isinstance(module, LoraLayer | BiasSwitch):
        module = module.base_layer
    state = module.state_dict()
    return {name: state[key] for key, name in base_names(module).items()}


def _is_below(key: str, parts: set[str]) -> bool:
    components = _without_wrappers(key).split(".")
    heads = (".".join(components[:at]) + "." for at in range(2, len(components)))
    return any(head in parts for head in heads)


def _without_wrappers(name: str) -> str:
    return ".".join(part for part in name.split(".") if part not in WRAPPER_COMPONENTS)

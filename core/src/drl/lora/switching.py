"""Choosing which adapters a model computes with: contexts for a while, ``use_adapters`` for good.

Contexts nest, and restore on exceptions. They say what a forward pass computes, not what its
backward pass recomputes: do not leave one between a checkpointed forward pass and its backward pass.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn

from drl.lora.errors import LoraError, name_list
from drl.lora.layer import LoraLayer
from drl.lora.switches import Host, SavedModule
from drl.lora.tree import hosts, hosts_of


@contextmanager
def adapter_off(module: nn.Module) -> Iterator[None]:
    """Make ``module`` compute as the base model: the reference policy.

    Trained biases and saved modules are off too, and the start values of ``pissa`` and ``olora``
    do not count, so that the output is that of the model before ``inject``, bit for bit. Raises
    ``LoraError`` when there are no adapters, because the reference would then silently be the
    policy itself, and while adapters are merged into the weights.
    """
    found = hosts(module)
    if not found:
        raise LoraError("the module has no adapters to switch off; call inject first")
    with _active(found, ()):
        yield


@contextmanager
def active_adapter(module: nn.Module, *names: str) -> Iterator[None]:
    """Make ``module`` compute with these adapters; the updates of several are added.

    Raises ``LoraError`` for a name that the model lacks, when two of them bring their own values
    of one bias or saved module, and while adapters are merged into the weights.
    """
    with _active(check_adapters(module, names), names):
        yield


def use_adapters(module: nn.Module, *names: str) -> None:
    """Make ``module`` compute with these adapters from now on; see ``active_adapter``.

    What trains stays as it is: see ``train_adapter``.
    """
    found = check_adapters(module, names)
    check_unmerged(found)
    for _, host in found:
        host.active = names


def check_adapters(module: nn.Module, names: tuple[str, ...]) -> list[tuple[str, Host]]:
    """Return what holds adapter tensors, once these names can all be active; see ``active_adapter``."""
    if not names:
        raise LoraError("no adapter is named; to compute without any, use adapter_off")
    for name in names:
        hosts_of(module, name)
    if len(set(names)) < len(names):
        raise LoraError(f"{name_list(names)}: an adapter is named twice")
    found = hosts(module)
    for fqn, host in found:
        parts = host.modules_to_save if isinstance(host, SavedModule) else host.lora_bias
        own = [name for name in names if name in parts]
        if len(own) > 1:
            raise LoraError(
                f"{name_list(own)} bring their own values of {fqn} (bias or modules_to_save), "
                "which cannot be added; activate one of them"
            )
    return found


@contextmanager
def _active(found: list[tuple[str, Host]], names: tuple[str, ...]) -> Iterator[None]:
    check_unmerged(found)
    before = [host.active for _, host in found]
    for _, host in found:
        host.active = names
    try:
        yield
    finally:
        for (_, host), active in zip(found, before, strict=True):
            host.active = active


def check_unmerged(found: list[tuple[str, Host]]) -> None:
    """Raise ``LoraError`` while the base weights contain an adapter."""
    merged = [fqn for fqn, host in found if isinstance(host, LoraLayer) and host.merged]
    if merged:
        raise LoraError(
            f"adapters are merged into the weights at {name_list(merged)}, so that none can be "
            "switched, added, removed or filled; call unmerge first"
        )

"""One adapter, copied out of its model: what is saved, exported and handed to other processes.

An adapter that started from the base weight (``pissa``, ``olora``) is converted: with start values
A0 and B0, ``s (B A - B0 A0) = s [B, -B0] [A; A0]`` is a plain adapter of twice the rank on the
untouched base (lora.md 2.3), which every tool reads.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
from torch import nn

from drl.lora.config import LoraConfig
from drl.lora.errors import LoraError, name_list
from drl.lora.layer import DEFAULT, LoraLayer
from drl.lora.matching import is_targeted
from drl.lora.naming import adapter_key
from drl.lora.peft_tensors import check_tensors
from drl.lora.state import adapter_state
from drl.lora.switches import SavedModule
from drl.lora.tree import hosts_of, lora_layers


@dataclass(frozen=True, slots=True, kw_only=True)
class AdapterSnapshot:
    """One adapter, copied out of its model.

    ``config`` describes ``tensors``: whole CPU tensors by the keys of ``drl.lora.state``, in the
    dtype they had. ``targets``: plain paths of the adapted layers, in registration order.
    """

    config: LoraConfig
    tensors: Mapping[str, torch.Tensor]
    targets: tuple[str, ...]


def adapter_snapshot(module: nn.Module, config: LoraConfig, name: str = DEFAULT) -> AdapterSnapshot:
    """Copy an adapter to the CPU; under FSDP2 every rank must call this, and all get the whole.

    ``config``: what the adapter was injected with. The snapshot's own config is another one where
    the adapter had to be converted. Raises ``LoraError`` when ``config`` does not describe the
    adapter, or a value is not finite.
    """
    check_described(module, config, name)
    state = adapter_state(module, name)
    if config.needs_base:
        state, config = _converted(module, state, config, name)
    tensors = {key: tensor.to("cpu", copy=True).contiguous() for key, tensor in state.items()}
    return snapshot_of(tensors, config)


def snapshot_of(tensors: Mapping[str, torch.Tensor], config: LoraConfig) -> AdapterSnapshot:
    """Return a snapshot of tensors that are there already, after checking that they fit."""
    if config.needs_base:
        raise LoraError(
            f'tensors of an adapter that started with init = "{config.init}" are relative to start '
            "values that they do not contain; take the snapshot from its model (adapter_snapshot)"
        )
    targets = check_tensors(tensors, config)
    stray = [fqn for fqn in targets if not is_targeted(config, fqn)]
    if stray:
        raise LoraError(
            f"target_modules and exclude_modules do not select {name_list(stray)}, so a reader of "
            "the directory would drop these adapters; pass the config that inject was given"
        )
    return AdapterSnapshot(config=config, tensors=tensors, targets=targets)


def check_described(module: nn.Module, config: LoraConfig, name: str) -> None:
    """Raise ``LoraError`` unless the adapter has the strengths, biases and copies of ``config``."""
    layers = {f: layer for f, layer in lora_layers(module).items() if name in layer.settings}
    wrong = [
        f"{fqn} (config {config.scale_of(fqn)}, model {layer.settings[name].scale})"
        for fqn, layer in layers.items()
        if config.scale_of(fqn) != layer.settings[name].scale
    ]
    if wrong:
        raise LoraError(
            f"the adapter would run at another strength than it was saved with: "
            f"{name_list(wrong)}; take the rank and alpha that it has"
        )
    found = [host for _, host in hosts_of(module, name)]
    has_saved = any(isinstance(host, SavedModule) for host in found)
    has_bias = any(not isinstance(host, SavedModule) and name in host.lora_bias for host in found)
    if has_saved and not config.modules_to_save:
        raise LoraError("the adapter has saved modules, but modules_to_save of the config is empty")
    if has_bias and config.bias == "none":
        raise LoraError('the adapter has trained biases, but bias of the config is "none"')


def _converted(
    module: nn.Module, state: Mapping[str, torch.Tensor], config: LoraConfig, name: str
) -> tuple[dict[str, torch.Tensor], LoraConfig]:
    doubled = dict(state)
    for fqn, layer in lora_layers(module).items():
        if name not in layer.lora_start:
            continue
        down, up = (adapter_key(fqn, matrix) for matrix in LoraLayer.matrices)
        A0, B0 = layer.start_values(name)
        doubled[down] = torch.cat([state[down], A0.to(state[down])], dim=0)
        doubled[up] = torch.cat([state[up], -B0.to(state[up])], dim=1)
    # the scale stays: alpha / r, or alpha / sqrt(r) under rsLoRA
    factor = math.sqrt(2) if config.use_rslora else 2
    plain = replace(
        config,
        init="kaiming-uniform",
        rank=2 * config.rank,
        alpha=factor * config.alpha,
        rank_pattern={key: 2 * rank for key, rank in config.rank_pattern.items()},
        alpha_pattern={key: factor * alpha for key, alpha in config.alpha_pattern.items()},
    )
    return doubled, plain

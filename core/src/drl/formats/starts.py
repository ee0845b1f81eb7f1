"""Adapters that count from start values: ``pissa`` and ``olora`` add ``scale * (B A - B0 A0)``.

A0 and B0 come from the base weight, so other formats cannot hold such an adapter as it is. As plain
matrices of twice the rank, ``[B, -B0]`` and ``[A; A0]``, it computes the same everywhere.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path

import torch
from safetensors import safe_open
from torch import Tensor

from drl.errors import BadInput
from drl.formats.adapter import Adapter, AdapterLayer
from drl.formats.layout import weight_files
from drl.lora import LoraConfig
from drl.lora.init import BASE_SCHEMES


def needs_base(adapter: Adapter) -> bool:
    """Say whether a component counts from start values."""
    return any(config.needs_base for config in adapter.configs.values())


def without_starts(adapter: Adapter, base: Path) -> Adapter:
    """Return the adapter as plain matrices; reads the adapted weights of the pipeline ``base``."""
    components = dict(adapter.components)
    configs = dict(adapter.configs)
    for name, config in adapter.configs.items():
        if not config.needs_base:
            continue
        with base_weights(base / name) as weights:
            components[name] = {
                path: plain_layer(layer, weights[f"{path}.weight"], config, path)
                for path, layer in components[name].items()
            }
        del configs[name]
    return replace(adapter, components=components, configs=configs)


def plain_layer(layer: AdapterLayer, W: Tensor, config: LoraConfig, path: str) -> AdapterLayer:
    """Return ``[B, -B0]``, ``[A; A0]`` at the same scale; W ``[out, in]`` is the base weight."""
    A0, B0 = BASE_SCHEMES[config.init](W.float(), config.rank_of(path), config.scale_of(path))
    return AdapterLayer(
        A=torch.cat([layer.A, A0.to(layer.A.dtype)]),
        B=torch.cat([layer.B, -B0.to(layer.B.dtype)], dim=1),
        alpha=2 * layer.alpha,
    )


class Weights(Mapping[str, Tensor]):
    """Tensors of a component folder by name, each read when it is asked for."""

    def __init__(self, folder: Path, stack: ExitStack) -> None:
        files = [stack.enter_context(safe_open(f, framework="pt")) for f in weight_files(folder)]
        self.folder = folder
        self.held = {name: file for file in files for name in file.offset_keys()}

    def __getitem__(self, name: str) -> Tensor:
        if name not in self.held:
            raise BadInput(f"{self.folder} has no tensor {name}; it is another base model")
        tensor: Tensor = self.held[name].get_tensor(name)
        return tensor

    def __iter__(self) -> Iterator[str]:
        return iter(self.held)

    def __len__(self) -> int:
        return len(self.held)


@contextmanager
def base_weights(folder: Path) -> Iterator[Weights]:
    """Open the weights of a component folder for reading."""
    with ExitStack() as stack:
        yield Weights(folder, stack)

"""Work of adapters: the matrix products of A and B, from the shapes that a model has (lora.md 6)."""

from __future__ import annotations

from collections.abc import Callable

from torch import nn

from drl.lora.layer import LoraEmbedding, LoraLayer
from drl.lora.tree import lora_layers


def adapter_flops(module: nn.Module, rows_of: Callable[[str], int]) -> float:
    """Return the forward work of the active adapters for one row, in operations (2 per multiply-add).

    Training costs three times that: gradients of both factors and of what they are fed. ``rows_of``
    gives the vectors that pass through a layer by its plain name. A merged adapter costs nothing; a
    module on the meta device will do.
    """
    return float(
        sum(2 * rows_of(path) * _factor_sizes(layer) for path, layer in lora_layers(module).items())
    )


def _factor_sizes(layer: LoraLayer) -> int:
    """Multiply-adds of one vector: elements of A and B; A of an Embedding is looked up, not multiplied."""
    if layer.merged:
        return 0
    total = 0
    for name in layer.active:
        if name in layer.settings:
            A, B = layer.factors(name)
            total += B.numel() + (0 if isinstance(layer, LoraEmbedding) else A.numel())
    return total

"""Gradient checkpointing: blocks whose activations are computed again instead of kept.

Non-reentrant (``torch.utils.checkpoint``, Chen et al. 2016, arXiv 1604.06174), under the autocast and with the
random state of the forward, so gradients are those without it. An eager block is recomputed through the
hook that diffusers models offer; a block that will be compiled recomputes inside its graph, which spares
the host a second launch of everything.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from drl.errors import BadInput
from drl.model.compiled import outermost

ROUNDING = 1e-9
"""A share as a binary fraction is off by less than this, times the number of blocks."""


def checkpoint_blocks(
    name: str,
    module: nn.Module,
    class_names: Sequence[str],
    share: float = 1.0,
    *,
    compiled: bool = False,
) -> int:
    """Recompute a share of the blocks of these classes, spread evenly; return how many.

    ``compiled``: the blocks will be compiled, and recompute inside their graphs. Call it before adapters
    are injected or parameters sharded; both keep the blocks. Raises BadInput for a component that is no
    diffusers model with gradient checkpointing, or that has none of these blocks.
    """
    from diffusers.models.modeling_utils import ModelMixin

    if not isinstance(module, ModelMixin) or not module._supports_gradient_checkpointing:
        raise BadInput(
            f"model.gradient_checkpointing: {name} ({type(module).__name__}) is no diffusers model that "
            "can recompute its blocks; set the option to false"
        )
    blocks = outermost(module, class_names)
    if not blocks:
        raise BadInput(
            f"model.gradient_checkpointing: {name} ({type(module).__name__}) has no module of class "
            f"{', '.join(class_names) or '(none)'}, which its family names as its blocks "
            "(TrainPipelineConfig.wrap); set the option to false"
        )
    recomputed = [block for place, block in enumerate(blocks) if chosen(place, share)]
    if compiled:
        for block in recomputed:
            block.__class__ = recomputing_class(type(block))
    else:
        kept = [block for block in blocks if block not in recomputed]
        module.enable_gradient_checkpointing(recompute_all_but(kept))
    return len(recomputed)


class Recomputing(nn.Module):
    """The forward of a block that is computed again in its backward; comes before the block's class."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Call the block; its signature is the caller's affair."""
        if not torch.is_grad_enabled():
            return super().forward(*args, **kwargs)
        return checkpoint(super().forward, *args, use_reentrant=False, **kwargs)


CLASSES: dict[type, type] = {}
"""Classes of recomputed blocks: one for all alike, so that alike blocks share a graph."""


def recomputing_class(kind: type) -> type:
    """Return the class of a block of this class that recomputes itself."""
    if kind not in CLASSES:
        CLASSES[kind] = type(kind.__name__, (Recomputing, kind), {})
    return CLASSES[kind]


def chosen(place: int, share: float) -> bool:
    """Say whether the block at this place is recomputed: n times the share of n blocks, rounded up."""
    return math.ceil((place + 1) * share - ROUNDING) > math.ceil(place * share - ROUNDING)


def recompute_all_but(kept: Sequence[nn.Module]) -> Callable[..., Any]:
    """Return the function that a diffusers model calls instead of a block."""
    whole = {id(block) for block in kept}

    def call(block: Callable[..., Any], *args: Any) -> Any:
        if id(block) in whole:
            return block(*args)
        return checkpoint(block, *args, use_reentrant=False)

    # the ids stay valid as long as the blocks live, which the model sees to
    return call

"""A Stable Diffusion 3 transformer of a few tiny blocks of three kinds, with adapters, inputs and gradients."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from diffusers import SD3Transformer2DModel
from torch import Tensor, nn

from drl.lora import LoraConfig, inject

WRAP = ("JointTransformerBlock",)
TARGETS = ("attn.to_q", "attn.to_v", "attn.to_out.0", "attn.add_q_proj")


def transformer(seed: int = 0, layers: int = 4) -> SD3Transformer2DModel:
    """Of four blocks two have a second attention, one has none, and the last drops its text."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return SD3Transformer2DModel(
            sample_size=8,
            patch_size=2,
            in_channels=4,
            out_channels=4,
            num_layers=layers,
            attention_head_dim=8,
            num_attention_heads=2,
            joint_attention_dim=16,
            caption_projection_dim=16,
            pooled_projection_dim=16,
            pos_embed_max_size=8,
            dual_attention_layers=(0, 1),
            qk_norm="rms_norm",
        )


def adapted(model: Any, *, dtype: torch.dtype = torch.float32, **settings: Any) -> Any:
    """Put adapters into a model that already change what it computes."""
    config = LoraConfig(
        **{"rank": 2, "alpha": 4, "target_modules": TARGETS, "init": "random"} | settings
    )
    inject(model, config, generator=torch.Generator().manual_seed(1), dtype=dtype, trainable=True)
    return model


def inputs(rows: int = 2, size: int = 8, seed: int = 3) -> tuple[Tensor, ...]:
    """Return latents, text, pooled text and time of some rows."""
    generator = torch.Generator().manual_seed(seed)
    return (
        torch.randn(rows, 4, size, size, generator=generator),
        torch.randn(rows, 6, 16, generator=generator),
        torch.randn(rows, 16, generator=generator),
        torch.full((rows,), 500.0),
    )


def predicted(model: nn.Module, dtype: torch.dtype | None = None, **shape: int) -> Tensor:
    """Return the prediction under autocast at a dtype; None for none."""
    with torch.autocast("cpu", dtype=dtype, enabled=dtype is not None):
        prediction: Tensor = model(*inputs(**shape)).sample
    return prediction


def gradients(
    model: nn.Module, dtype: torch.dtype | None = None, **shape: int
) -> dict[str, Tensor]:
    """Return the gradients of a forward and backward with fixed dropout."""
    model.train()
    model.zero_grad()
    with torch.random.fork_rng():
        torch.manual_seed(5)
        predicted(model, dtype, **shape).float().square().sum().backward()
    return {
        name: parameter.grad.clone()
        for name, parameter in model.named_parameters()
        if parameter.grad is not None
    }


def largest_difference(left: dict[str, Tensor], right: dict[str, Tensor]) -> float:
    """Return the largest difference of two sets of gradients; they must have the same names."""
    assert left.keys() == right.keys()
    return max((left[name] - right[name]).abs().max().item() for name in left)


@contextmanager
def saved_bytes() -> Iterator[list[int]]:
    """Count the bytes that autograd keeps for a backward, each storage once, into the list's one entry."""
    sizes: dict[int, int] = {}
    total = [0]

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        sizes[storage.data_ptr()] = storage.nbytes()
        total[0] = sum(sizes.values())
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        yield total

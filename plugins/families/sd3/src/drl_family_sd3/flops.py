"""Work of one row of the Stable Diffusion 3 transformer, as a closed form of its config.

Counted: every matrix product (2 operations per multiply-add), attention included; not counted:
norms, activations, additions. The layers are those of Esser et al. 2024 (arXiv 2403.03206, figure 2)
and of the 3.5 models, whose first blocks have a second self-attention over the image tokens.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from drl.api import Flops, RowShape

TIME_FEATURES = 256
MLP_RATIO = 4
TEXT_PARTS = frozenset(
    ("context_embedder", "add_q_proj", "add_k_proj", "add_v_proj", "to_add_out", "ff_context")
)
"""Parts of the names of layers that the text tokens pass through."""


def row_flops(config: Mapping[str, Any], shape: RowShape) -> Flops:
    """Return the work of one row; a full backward pass costs twice its forward (both operands)."""
    image, text, width = image_tokens(config, shape), shape.text_tokens, _width(config)
    layers = int(config["num_layers"])
    dual = set(config.get("dual_attention_layers") or ())
    blocks = [
        block_flops(width, image, text, last=i == layers - 1, dual=i in dual) for i in range(layers)
    ]
    inputs = [
        block_input_gradient(width, image, text, first=i == 0, last=i == layers - 1, dual=i in dual)
        for i in range(layers)
    ]
    forward = float(sum(blocks) + edge_flops(config, image, text))
    out = 2 * int(config["patch_size"]) ** 2 * _channels_out(config) * width * image
    return Flops(forward=forward, backward=2 * forward, input_gradient=float(sum(inputs) + out))


def image_tokens(config: Mapping[str, Any], shape: RowShape) -> int:
    """Return the number of patches of one latent ``(C, H, W)``."""
    height, width = shape.latent[-2:]
    patch = int(config["patch_size"])
    return (height // patch) * (width // patch)


def block_flops(width: int, image: int, text: int, *, last: bool, dual: bool) -> int:
    """Return the work of one joint block; the last one drops its text stream after attention."""
    square = width * width
    modulation = (9 if dual else 6) + (2 if last else 6)
    image_layers = 4 + 2 * MLP_RATIO + (4 if dual else 0)
    text_layers = 3 if last else 4 + 2 * MLP_RATIO
    linear = 2 * square * (modulation + image_layers * image + text_layers * text)
    attention = 4 * width * ((image + text) ** 2 + (image**2 if dual else 0))
    return linear + attention


def block_input_gradient(
    width: int, image: int, text: int, *, first: bool, last: bool, dual: bool
) -> int:
    """Return the backward work of one joint block of frozen weights with adapters on its attention.

    Both operands of an attention need a gradient, of a linear layer only its input. Modulations are fed by
    the time and the pooled text alone, and what enters the first block depends on nothing trained, so
    neither they nor its projections and its second attention have any.
    """
    square = width * width
    image_layers = 1 + 2 * MLP_RATIO + (0 if first else 3 + (4 if dual else 0))
    text_layers = (0 if last else 1 + 2 * MLP_RATIO) + (0 if first else 3)
    linear = 2 * square * (image_layers * image + text_layers * text)
    second = image**2 if dual and not first else 0
    return linear + 8 * width * ((image + text) ** 2 + second)


def layer_tokens(config: Mapping[str, Any], shape: RowShape, layer: str) -> int:
    """Return how many vectors of one row pass through a layer: image or text tokens, or 1."""
    if layer.startswith("time_text_embed.") or "norm" in layer:
        return 1
    parts = set(layer.split("."))
    return shape.text_tokens if parts & TEXT_PARTS else image_tokens(config, shape)


def edge_flops(config: Mapping[str, Any], image: int, text: int) -> int:
    """Return the work before and after the blocks: patches, time, text, output."""
    width = _width(config)
    patch_area = int(config["patch_size"]) ** 2
    time = width * (TIME_FEATURES + width) + width * (int(config["pooled_projection_dim"]) + width)
    context = int(config["joint_attention_dim"]) * int(config["caption_projection_dim"]) * text
    patches = patch_area * (int(config["in_channels"]) + _channels_out(config)) * width * image
    return 2 * (time + context + patches + 2 * width * width)


def _width(config: Mapping[str, Any]) -> int:
    return int(config["num_attention_heads"]) * int(config["attention_head_dim"])


def _channels_out(config: Mapping[str, Any]) -> int:
    return int(config["out_channels"] or config["in_channels"])

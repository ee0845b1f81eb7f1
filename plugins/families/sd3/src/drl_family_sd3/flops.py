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


def row_flops(config: Mapping[str, Any], shape: RowShape) -> Flops:
    """Return the work of one row; a backward pass costs twice its forward (both operands)."""
    image = image_tokens(config, shape)
    layers = int(config["num_layers"])
    dual = set(config.get("dual_attention_layers") or ())
    blocks = sum(
        block_flops(_width(config), image, shape.text_tokens, last=i == layers - 1, dual=i in dual)
        for i in range(layers)
    )
    forward = float(blocks + edge_flops(config, image, shape.text_tokens))
    return Flops(forward=forward, backward=2 * forward)


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


def edge_flops(config: Mapping[str, Any], image: int, text: int) -> int:
    """Return the work before and after the blocks: patches, time, text, output."""
    width = _width(config)
    patch_area = int(config["patch_size"]) ** 2
    channels_in = int(config["in_channels"])
    channels_out = int(config["out_channels"] or channels_in)
    time = width * (TIME_FEATURES + width) + width * (int(config["pooled_projection_dim"]) + width)
    context = int(config["joint_attention_dim"]) * int(config["caption_projection_dim"]) * text
    patches = patch_area * (channels_in + channels_out) * width * image
    return 2 * (time + context + patches + 2 * width * width)


def _width(config: Mapping[str, Any]) -> int:
    return int(config["num_attention_heads"]) * int(config["attention_head_dim"])

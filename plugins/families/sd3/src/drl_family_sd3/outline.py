"""What ``drl plan`` asks of a Stable Diffusion 3 pipeline: shapes of a recipe, weights beside the transformer.

Models are built on the meta device from their configs, so nothing is read but JSON and the tokenizers.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from drl.api import VISUAL, BadInput, Outline, Part, Sampling
from drl.mathematics.feeding import DTYPES
from drl_family_sd3.checkpoint import CLASSES, has_part, read_config, read_index, readable
from drl_family_sd3.config import Sd3Options
from drl_family_sd3.forward import POOLED, TEXT
from drl_family_sd3.pipeline import sizes_of
from drl_family_sd3.text import open_text_encoders

TEXT_PARTS = ("text_encoder", "text_encoder_2", "text_encoder_3")


def outline(checkpoint: str, options: Sd3Options, sampling: Sampling) -> Outline:
    """Return the outline of a recipe; BadInput when the checkpoint's configs cannot be read."""
    config = read_config(checkpoint, "transformer")
    latent = sizes_of(checkpoint).latent(sampling)
    tokens = text_tokens(checkpoint, options)
    vae = blank_vae(checkpoint, options)
    return Outline(
        streams={VISUAL: latent},
        condition={
            TEXT: (tokens, int(config["joint_attention_dim"])),
            POOLED: (int(config["pooled_projection_dim"]),),
        },
        text_tokens=tokens,
        parts=(*text_parts(checkpoint, options), Part(name="vae", weight_bytes=_bytes(vae))),
        decode=lambda: decode(vae, (options.decode_rows, *latent)),
        decode_rows=options.decode_rows,
        decode_dtype=options.vae_dtype,
        decode_compiled=options.compile_vae,
        decode_option="model.sd3.decode_rows",
    )


def text_tokens(checkpoint: str, options: Sd3Options) -> int:
    """Return the tokens of a prompt: those of CLIP, followed by those of T5."""
    encoders = open_text_encoders(checkpoint, options, "cpu")
    return int(encoders.clips[0].tokenizer.model_max_length) + encoders.t5.length


def text_parts(checkpoint: str, options: Sd3Options) -> list[Part]:
    """Return the text encoders that the pipeline has."""
    index = read_index(checkpoint)
    return [
        Part(
            name=name,
            weight_bytes=_bytes(blank_text_encoder(checkpoint, name, options)),
            resident=options.text_encoders == "resident",
            release='model.sd3.text_encoders = "released"',
        )
        for name in TEXT_PARTS
        if has_part(index, name)
    ]


def blank_text_encoder(checkpoint: str, part: str, options: Sd3Options) -> nn.Module:
    """Return a text encoder without weights, each in the dtype that it is loaded in."""
    kind = CLASSES[part]
    with readable(checkpoint, f"the config of {part}"):
        values, _ = kind.config_class.get_config_dict(checkpoint, subfolder=part)
    if not values:
        raise BadInput(f"model.checkpoint: {checkpoint} has no {part}/config.json")
    with torch.device("meta"):
        blank: nn.Module = kind(kind.config_class.from_dict(values))
    # some layers of T5 overflow in fp16: the library keeps them in fp32, then alone
    pinned = set(kind._keep_in_fp32_modules or ()) if options.text_dtype == "fp16" else set()
    for name, parameter in blank.named_parameters():
        if not pinned & set(name.split(".")):
            parameter.data = parameter.data.to(DTYPES[options.text_dtype])
    return blank


def blank_vae(checkpoint: str, options: Sd3Options) -> Any:
    """Return the VAE without weights, as the pipeline decodes with it."""
    config = read_config(checkpoint, "vae")
    with torch.device("meta"):
        vae = CLASSES["vae"].from_config(config)
    if options.tiled_decode:
        vae.enable_tiling()
    nn.Module.to(vae, DTYPES[options.vae_dtype])
    return vae.eval()


def decode(vae: Any, shape: tuple[int, ...]) -> torch.Tensor:
    """Decode blank latents ``(B, C, H, W)`` into pictures in [0, 1]."""
    latents = torch.empty(shape, dtype=vae.dtype, device="meta")
    with torch.no_grad():
        images = vae.decode(latents, return_dict=False)[0]
        pixels: torch.Tensor = (images.float() / 2 + 0.5).clamp(0, 1)
    return pixels


def _bytes(module: nn.Module) -> int:
    tensors = [*module.parameters(), *module.buffers()]
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)

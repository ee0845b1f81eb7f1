"""A Stable Diffusion 3.5 Medium of random weights: its own transformer and VAE, small text encoders.

``python tests/gpu/pipelines.py FOLDER`` writes one; ``--size small`` the same kinds of layers for a CPU.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from diffusers import (
    AutoencoderKL,
    FlowMatchEulerDiscreteScheduler,
    SD3Transformer2DModel,
    StableDiffusion3Pipeline,
)
from transformers import CLIPTextConfig, CLIPTextModelWithProjection, T5Config, T5EncoderModel

from drl_family_sd3.tiny import clip_tokenizer, seeded, t5_tokenizer

CLIP_TOKENS, T5_TOKENS = 77, 256


@dataclass(frozen=True)
class Size:
    """Configs of a pipeline; ``clips``: widths of the two CLIP encoders."""

    transformer: Mapping[str, Any]
    clips: tuple[int, int]
    vae_channels: tuple[int, ...]
    vae_layers: int


MEDIUM = Size(
    transformer={
        "sample_size": 128,
        "num_layers": 24,
        "attention_head_dim": 64,
        "num_attention_heads": 24,
        "joint_attention_dim": 4096,
        "caption_projection_dim": 1536,
        "pooled_projection_dim": 2048,
        "pos_embed_max_size": 384,
        "dual_attention_layers": tuple(range(13)),
    },
    clips=(768, 1280),
    vae_channels=(128, 256, 512, 512),
    vae_layers=2,
)
SMALL = Size(
    transformer={
        "sample_size": 32,
        "num_layers": 2,
        "attention_head_dim": 32,
        "num_attention_heads": 2,
        "joint_attention_dim": 128,
        "caption_projection_dim": 64,
        "pooled_projection_dim": 128,
        "pos_embed_max_size": 32,
        "dual_attention_layers": (0,),
    },
    clips=(64, 64),
    vae_channels=(32, 32, 32, 32),
    vae_layers=1,
)
"""The same kinds of layers, for a machine without a GPU."""


def write_pipeline(folder: Path, size: Size, *, device: str, seed: int) -> None:
    """Write a pipeline that diffusers and drl load; the transformer is made on the device, saved in bf16."""
    clip_tokens, t5_tokens = clip_tokenizer(CLIP_TOKENS), t5_tokenizer(T5_TOKENS)
    with seeded(seed):
        with torch.device(device):
            transformer = SD3Transformer2DModel(
                **size.transformer,
                patch_size=2,
                in_channels=16,
                out_channels=16,
                qk_norm="rms_norm",
            )
        table = transformer.pos_embed.pos_embed
        transformer.to(torch.bfloat16)
        transformer.pos_embed.pos_embed = table
        pipeline = StableDiffusion3Pipeline(
            transformer=transformer.cpu(),
            scheduler=FlowMatchEulerDiscreteScheduler(shift=3.0),
            vae=vae(size),
            text_encoder=clip(size.clips[0], clip_tokens),
            tokenizer=clip_tokens,
            text_encoder_2=clip(size.clips[1], clip_tokens),
            tokenizer_2=clip_tokenizer(CLIP_TOKENS),
            text_encoder_3=t5(size.transformer["joint_attention_dim"], t5_tokens),
            tokenizer_3=t5_tokens,
        )
    pipeline.save_pretrained(folder)


def vae(size: Size) -> AutoencoderKL:
    """Return the 16-channel autoencoder of Stable Diffusion 3."""
    blocks = len(size.vae_channels)
    return AutoencoderKL(
        block_out_channels=size.vae_channels,
        down_block_types=("DownEncoderBlock2D",) * blocks,
        up_block_types=("UpDecoderBlock2D",) * blocks,
        layers_per_block=size.vae_layers,
        latent_channels=16,
        sample_size=1024,
        scaling_factor=1.5305,
        shift_factor=0.0609,
        use_quant_conv=False,
        use_post_quant_conv=False,
    )


def clip(width: int, tokenizer: Any) -> CLIPTextModelWithProjection:
    """Return a CLIP encoder of two layers."""
    return CLIPTextModelWithProjection(
        CLIPTextConfig(
            vocab_size=len(tokenizer),
            hidden_size=width,
            intermediate_size=2 * width,
            projection_dim=width,
            num_hidden_layers=2,
            num_attention_heads=width // 64,
            max_position_embeddings=CLIP_TOKENS,
            bos_token_id=tokenizer.bos_token_id,
            eos_token_id=tokenizer.eos_token_id,
            pad_token_id=tokenizer.pad_token_id,
        )
    )


def t5(width: int, tokenizer: Any) -> T5EncoderModel:
    """Return a T5 encoder of one narrow layer with wide outputs."""
    config = T5Config(
        vocab_size=len(tokenizer),
        d_model=width,
        d_kv=64,
        d_ff=256,
        num_layers=1,
        num_heads=2,
        feed_forward_proj="gated-gelu",
        pad_token_id=tokenizer.pad_token_id,
        eos_token_id=tokenizer.eos_token_id,
    )
    return T5EncoderModel(config)


def main() -> None:
    """Write a pipeline into the folder named."""
    parser = argparse.ArgumentParser(description=__doc__)
    cuda = torch.cuda.is_available()
    parser.add_argument("folder", type=Path)
    parser.add_argument(
        "--size", choices=("medium", "small"), default="medium" if cuda else "small"
    )
    options = parser.parse_args()
    size = MEDIUM if options.size == "medium" else SMALL
    write_pipeline(options.folder, size, device="cuda" if cuda else "cpu", seed=0)


if __name__ == "__main__":
    main()

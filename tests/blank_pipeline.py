"""Folders of a Stable Diffusion 3 pipeline without a single weight: configs and tokenizers, of any size."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from diffusers import FlowMatchEulerDiscreteScheduler, SD3Transformer2DModel
from gpu.pipelines import CLIP_TOKENS, T5_TOKENS, Size, clip, t5, vae

from drl_family_sd3.tiny import clip_tokenizer, t5_tokenizer

KINDS = {
    "transformer": ["diffusers", "SD3Transformer2DModel"],
    "vae": ["diffusers", "AutoencoderKL"],
    "scheduler": ["diffusers", "FlowMatchEulerDiscreteScheduler"],
    "text_encoder": ["transformers", "CLIPTextModelWithProjection"],
    "text_encoder_2": ["transformers", "CLIPTextModelWithProjection"],
    "text_encoder_3": ["transformers", "T5EncoderModel"],
}


def write_blank(folder: Path, size: Size) -> Path:
    """Write everything of ``gpu.pipelines.write_pipeline`` but the weights; return the folder."""
    clip_tokens, t5_tokens = clip_tokenizer(CLIP_TOKENS), t5_tokenizer(T5_TOKENS)
    with torch.device("meta"):
        transformer = SD3Transformer2DModel(
            **size.transformer, patch_size=2, in_channels=16, out_channels=16, qk_norm="rms_norm"
        )
        encoders = [clip(size.clips[0], clip_tokens), clip(size.clips[1], clip_tokens)]
        encoders.append(t5(size.transformer["joint_attention_dim"], t5_tokens))
        pictures = vae(size)
    transformer.save_config(folder / "transformer")
    pictures.save_config(folder / "vae")
    FlowMatchEulerDiscreteScheduler(shift=3.0).save_pretrained(folder / "scheduler")
    for end, encoder, tokens in zip(
        ("", "_2", "_3"), encoders, (clip_tokens, clip_tokens, t5_tokens), strict=True
    ):
        encoder.config.save_pretrained(folder / f"text_encoder{end}")
        tokens.save_pretrained(folder / f"tokenizer{end}")
    index = {"_class_name": "StableDiffusion3Pipeline", "_diffusers_version": "0.42.0", **KINDS}
    (folder / "model_index.json").write_text(json.dumps(index))
    return folder

"""The family of ``acme_wan``: the Wan VAE, its transformer, and a stand-in for its text encoder."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from diffusers import AutoencoderKLWan, WanTransformer3DModel

from drl.api import (
    VISUAL,
    BadInput,
    Condition,
    ConditionRecord,
    Family,
    Pipeline,
    Problem,
    TrainPipelineConfig,
)

TOKENS, WIDTH = 12, 16


def build_wan(folder, seed=0):
    """Write a tiny pipeline with random weights: 8 pixels and 4 frames per latent, 4 channels."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        vae = AutoencoderKLWan(
            base_dim=8,
            z_dim=4,
            dim_mult=[1, 1, 1, 1],
            num_res_blocks=1,
            latents_mean=[0.1, -0.1, 0.0, 0.2],
            latents_std=[1.0, 2.0, 0.5, 1.0],
        )
        transformer = WanTransformer3DModel(
            num_attention_heads=2,
            attention_head_dim=12,
            in_channels=4,
            out_channels=4,
            text_dim=WIDTH,
            freq_dim=16,
            ffn_dim=32,
            num_layers=1,
        )
    vae.save_pretrained(folder / "vae")
    transformer.save_pretrained(folder / "transformer")
    index = {"_class_name": "WanPipeline", "vae": ["diffusers", "AutoencoderKLWan"]}
    (folder / "model_index.json").write_text(json.dumps(index))


class WanPipeline(Pipeline):
    """Encodes only."""

    def __init__(self, checkpoint):
        self.vae = AutoencoderKLWan.from_pretrained(checkpoint, subfolder="vae").eval()

    def encode_text(self, prompts):
        return [ConditionRecord(tensors={"text": embedded(prompt)}) for prompt in prompts]

    @torch.no_grad()
    def encode_media(self, media, generator):
        frames = media.pixels.shape[1]
        if frames % 4 != 1:
            raise BadInput(f"a video for family 'acme_wan' has 4 k + 1 frames, got {frames}")
        latents = self.vae.encode(2 * media.pixels[None] - 1).latent_dist.sample(generator)[0]
        mean, std = (
            torch.tensor(values).reshape(-1, 1, 1, 1)
            for values in (self.vae.config.latents_mean, self.vae.config.latents_std)
        )
        return {VISUAL: (latents - mean) / std}

    def sigmas(self, sampling):
        raise NotImplementedError

    def timesteps(self, sampling):
        raise NotImplementedError

    def initial(self, sampling, generator):
        raise NotImplementedError

    def decode(self, streams):
        raise NotImplementedError


def embedded(prompt):
    """Return ``(12, 16)``: bits of the first letters, zeros after the text's end."""
    codes = torch.tensor([*prompt.encode()[:TOKENS]] + [0] * TOKENS)[:TOKENS]
    return (codes[:, None] >> torch.arange(WIDTH) & 1).float()


class WanFamily(Family):
    """One transformer, whose latents are ``(C, T, H, W)``."""

    def pipeline_config(self, component, config):
        return TrainPipelineConfig(lora_targets=("to_q", "to_v"), wrap=("WanTransformerBlock",))

    def check(self, recipe):
        if recipe.sampling.num_frames % 4 != 1:
            yield Problem("sampling.num_frames", "this model needs 4 k + 1 frames")

    def build(self, component, source):
        return WanTransformer3DModel.from_pretrained(source.checkpoint, subfolder=component)

    def component_config(self, component, checkpoint):
        return json.loads((Path(checkpoint) / component / "config.json").read_text())

    def condition(self, record):
        return Condition(arguments={"text": record.tensors["text"][None]})

    def collate(self, conditions, pad_to=None):
        joined = torch.cat([condition.arguments["text"] for condition in conditions])
        return Condition(arguments={"text": joined}, rows=len(conditions))

    def model_time(self, sigma_B, timestep_B):
        return timestep_B if timestep_B is not None else 1000 * sigma_B

    def forward(self, model, streams, model_time_B, condition):
        velocity = model(
            hidden_states=streams[VISUAL],
            timestep=model_time_B,
            encoder_hidden_states=condition.arguments["text"],
            return_dict=False,
        )[0]
        return {VISUAL: velocity}

    def guide(self, positive, negative, guidance):
        raise NotImplementedError

    def pipeline(self, checkpoint, context):
        return WanPipeline(checkpoint)

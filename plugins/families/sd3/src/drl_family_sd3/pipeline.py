"""The sampling half of Stable Diffusion 3: text, sigma table, first latents, VAE."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch
from diffusers.models.autoencoders.vae import DiagonalGaussianDistribution

from drl.api import (
    VISUAL,
    BadInput,
    ConditionRecord,
    Context,
    Media,
    Pipeline,
    Problem,
    Sampling,
    Streams,
)
from drl.mathematics.feeding import DTYPES
from drl.model.compiled import Compilations, compile_blocks
from drl.model.moving import release_cached
from drl_family_sd3.checkpoint import CLASSES, load_part, read_config, read_index
from drl_family_sd3.config import Sd3Options
from drl_family_sd3.prompts import PromptRecords
from drl_family_sd3.residence import Resident
from drl_family_sd3.text import check_text_encoders, open_text_encoders

if TYPE_CHECKING:
    from torch import Generator, Tensor

DECODER_BLOCKS = ("UNetMidBlock2D", "UpDecoderBlock2D")


@dataclass(frozen=True)
class Sizes:
    """Which picture sizes a checkpoint can make. ``factor``: pixels per latent cell."""

    channels: int
    factor: int
    patch: int
    largest: int

    def problems(self, height: int, width: int) -> Iterator[Problem]:
        """Yield what is wrong with a size, by option."""
        step = self.factor * self.patch
        most = step * self.largest
        for name, value in (("height", height), ("width", width)):
            if value < step or value % step:
                below = max(step, value - value % step)
                yield Problem(
                    f"sampling.{name}",
                    f"{value} is no multiple of {step} ({self.factor} pixels per latent, "
                    f"{self.patch} latents per patch); use {below} or {below + step}",
                )
            elif value > most:
                yield Problem(
                    f"sampling.{name}",
                    f"{value} is above {most}, the largest side this checkpoint has positions for",
                )

    def latent(self, sampling: Sampling) -> tuple[int, int, int]:
        """Return ``(C, H, W)`` of the latents; BadInput names the option that does not fit."""
        problems = [*self.problems(sampling.height, sampling.width)]
        if sampling.num_frames != 1:
            problems.append(
                Problem("sampling.num_frames", "this model makes single pictures; use 1")
            )
        if problems:
            raise BadInput("; ".join(f"{p.path}: {p.message}" for p in problems))
        return self.channels, sampling.height // self.factor, sampling.width // self.factor


def sizes_of(checkpoint: str) -> Sizes:
    """Read the sizes that a checkpoint can make from its configs."""
    transformer = read_config(checkpoint, "transformer")
    vae = read_config(checkpoint, "vae")
    return Sizes(
        channels=int(transformer["in_channels"]),
        factor=2 ** (len(vae["block_out_channels"]) - 1),
        patch=int(transformer["patch_size"]),
        largest=int(transformer["pos_embed_max_size"]),
    )


class Sd3Pipeline(Pipeline):
    """Text encoders, scheduler and VAE of one checkpoint; encoders and VAE load at their first use.

    So a driver that only compares schedules holds none of them. Not for two threads at a time.
    """

    def __init__(self, checkpoint: str, options: Sd3Options, context: Context) -> None:
        read_index(checkpoint)
        check_text_encoders(checkpoint)
        self.checkpoint = checkpoint
        self.options = options
        self.device = context.device
        self.sizes = sizes_of(checkpoint)
        self.schedule: Mapping[str, Any] = read_config(checkpoint, "scheduler")
        self._vae = Resident(self._load_vae, self.device)

    @cached_property
    def text(self) -> PromptRecords:
        """The records of prompts, with the encoders that make them."""
        encoders = open_text_encoders(self.checkpoint, self.options, self.device)
        return PromptRecords(encoders, self.options, self.device)

    @property
    def vae(self) -> Any:
        """The VAE, on the device."""
        return self._vae.get()

    def _load_vae(self) -> Any:
        vae = load_part(self.checkpoint, "vae", dtype=self.options.vae_dtype, device=self.device)
        if self.options.tiled_decode:
            vae.enable_tiling()
        if self.options.compile_vae:
            compile_blocks(vae.decoder, DECODER_BLOCKS, Compilations("vae"))
        return vae

    @property
    def scale(self) -> float:
        """Factor from the VAE's latents to the model's."""
        return float(self.vae.config.scaling_factor)

    @property
    def shift(self) -> float:
        """Mean of the VAE's latents that the model's are centred by."""
        return float(self.vae.config.shift_factor or 0.0)

    def encode_text(self, prompts: Sequence[str]) -> list[ConditionRecord]:
        """Return one record per prompt, each encoded alone, float32 on the device; the latest are kept."""
        return self.text.encode(prompts)

    def expect(self, prompts: Sequence[str]) -> None:
        """Encode these prompts now and let go of the encoders, under ``text_encoders = "released"``."""
        self.text.expect(prompts)

    def release(self) -> None:
        """Move encoders, VAE and records to the CPU; what is used next comes back, bit for bit."""
        if "text" in vars(self):  # a pipeline that never saw a prompt has not read a tokenizer
            self.text.release()
        self._vae.release()
        release_cached(self.device)

    @torch.no_grad()
    def encode_media(self, media: Media, generator: Generator) -> Streams:
        """Draw latents ``(C, H, W)`` float32 from the VAE's posterior, in model space."""
        pixels = media.pixels
        if tuple(pixels.shape[:2]) != (3, 1):
            raise BadInput(
                f"a picture for family 'sd3' is (3, 1, height, width), got {tuple(pixels.shape)}"
            )
        image = (2 * pixels[:, 0] - 1)[None].to(self.device, DTYPES[self.options.vae_dtype])
        moments = self.vae.encode(image).latent_dist.parameters
        latents = DiagonalGaussianDistribution(moments.float()).sample(generator)[0]
        return {VISUAL: ((latents - self.shift) * self.scale).cpu()}

    def sigmas(self, sampling: Sampling) -> Tensor:
        """Return the checkpoint's sigma table ``(S + 1,)``, under ``flow_shift`` when it is set."""
        sigmas: Tensor = self._scheduler(sampling).sigmas
        return sigmas

    def timesteps(self, sampling: Sampling) -> Tensor:
        """Return ``(S,)``: 1000 times sigma."""
        timesteps: Tensor = self._scheduler(sampling).timesteps
        return timesteps

    def _scheduler(self, sampling: Sampling) -> Any:
        changes: dict[str, float] = {}
        mu = None
        if self.schedule.get("use_dynamic_shifting"):
            mu = self._dynamic_shift(sampling)
        elif sampling.flow_shift is not None:
            changes["shift"] = sampling.flow_shift
        scheduler = CLASSES["scheduler"].from_config(dict(self.schedule), **changes)
        scheduler.set_timesteps(sampling.num_steps, mu=mu)
        return scheduler

    def _dynamic_shift(self, sampling: Sampling) -> float:
        """Interpolate the shift between the two image sizes of the scheduler's config."""
        if sampling.flow_shift is not None:
            raise BadInput(
                "sampling.flow_shift: the scheduler of this checkpoint derives its shift from the "
                "picture size; leave flow_shift out"
            )
        _, height, width = self.sizes.latent(sampling)
        tokens = (height // self.sizes.patch) * (width // self.sizes.patch)
        low, high = self.schedule["base_image_seq_len"], self.schedule["max_image_seq_len"]
        slope = (self.schedule["max_shift"] - self.schedule["base_shift"]) / (high - low)
        return float(tokens * slope + (self.schedule["base_shift"] - slope * low))

    def initial(self, sampling: Sampling, generator: Generator) -> Streams:
        """Draw ``(C, H, W)`` standard normal float32 latents, on the generator's device."""
        shape = (1, *self.sizes.latent(sampling))
        noise = torch.randn(shape, generator=generator, device=generator.device)
        return {VISUAL: noise[0]}

    @torch.no_grad()
    def decode(self, streams: Streams) -> list[Media]:
        """Decode ``(B, C, H, W)`` latents into pictures ``(3, 1, 8H, 8W)`` float32 in [0, 1], on the device."""
        rows = torch.split(streams[VISUAL], self.options.decode_rows)
        return [media for chunk in rows for media in self._decode_rows(chunk)]

    def _decode_rows(self, latents: Tensor) -> Iterator[Media]:
        count = latents.shape[0]
        rows = latents.to(self.device, torch.float32) / self.scale + self.shift
        lacking = self.options.decode_rows - count
        if lacking > 0:
            rows = torch.cat([rows, rows[-1:].expand(lacking, *rows.shape[1:])])
        images = self.vae.decode(rows.to(DTYPES[self.options.vae_dtype]), return_dict=False)[0]
        pixels = (images[:count].float() / 2 + 0.5).clamp(0, 1)
        return (Media(pixels=image[:, None]) for image in pixels)

"""The sampling half of Stable Diffusion 3: text, sigma table, first latents, VAE."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch

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
from drl_family_sd3.checkpoint import CLASSES, load_part, read_config, read_index
from drl_family_sd3.config import Sd3Options
from drl_family_sd3.text import TextEncoders, check_text_encoders, load_text_encoders

if TYPE_CHECKING:
    from torch import Generator, Tensor


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

    So a driver that only compares schedules holds none of them.
    """

    def __init__(self, checkpoint: str, options: Sd3Options, context: Context) -> None:
        read_index(checkpoint)
        check_text_encoders(checkpoint)
        self.checkpoint = checkpoint
        self.options = options
        self.device = context.device
        self.sizes = sizes_of(checkpoint)
        self.schedule: Mapping[str, Any] = read_config(checkpoint, "scheduler")

    @cached_property
    def text(self) -> TextEncoders:
        """The text encoders, with their cache of prompts."""
        return load_text_encoders(self.checkpoint, self.options, self.device)

    @cached_property
    def vae(self) -> Any:
        """The VAE, always float32: it overflows in float16, and it is a small part of the work."""
        vae = load_part(self.checkpoint, "vae", dtype="fp32", device=self.device)
        if self.options.tiled_decode:
            vae.enable_tiling()
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
        """Return one record per prompt, each encoded alone; the latest are kept in memory."""
        return [self.text.encode(prompt) for prompt in prompts]

    @torch.no_grad()
    def encode_media(self, media: Media, generator: Generator) -> Streams:
        """Draw latents ``(C, H, W)`` float32 from the VAE's posterior, in model space."""
        pixels = media.pixels
        if tuple(pixels.shape[:2]) != (3, 1):
            raise BadInput(
                f"a picture for family 'sd3' is (3, 1, height, width), got {tuple(pixels.shape)}"
            )
        image = (2 * pixels[:, 0] - 1)[None].to(self.device, torch.float32)
        latents = self.vae.encode(image).latent_dist.sample(generator)[0]
        return {VISUAL: ((latents - self.shift) * self.scale).float().cpu()}

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
        """Decode ``(B, C, H, W)`` latents into pictures ``(3, 1, 8H, 8W)`` in [0, 1]."""
        rows = torch.split(streams[VISUAL], self.options.decode_rows)
        return [media for chunk in rows for media in self._decode_rows(chunk)]

    def _decode_rows(self, latents: Tensor) -> Iterator[Media]:
        count = latents.shape[0]
        filler = latents[-1:].expand(self.options.decode_rows - count, *latents.shape[1:])
        full = torch.cat([latents, filler]).to(self.device, torch.float32)
        images = self.vae.decode(full / self.scale + self.shift, return_dict=False)[0]
        pixels = (images[:count] / 2 + 0.5).clamp(0, 1).cpu()
        return (Media(pixels=image[:, None]) for image in pixels)

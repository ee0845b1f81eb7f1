"""Training the glyph VAE on renders of random strings: 20 to 80 CPU seconds on one thread."""

from __future__ import annotations

from collections.abc import Callable

import torch
from diffusers import AutoencoderKL
from torch.nn import functional

from .render import render_batch
from .words import random_strings

STEPS = 250
BATCH = 32
PEAK_LEARNING_RATE = 2e-3
KL_WEIGHT = 2e-6
PICTURES = 6000
STATISTICS_PICTURES = 1000

Report = Callable[[int, int, float], None]


def vae_loss(vae: AutoencoderKL, pixels: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """L1 + MSE + a little KL for float32 pixels ``[n, 3, h, w]`` in -1 to 1; a scalar."""
    posterior = vae.encode(pixels).latent_dist
    decoded = vae.decode(posterior.sample(generator=generator)).sample
    error = functional.l1_loss(decoded, pixels) + functional.mse_loss(decoded, pixels)
    total: torch.Tensor = error + KL_WEIGHT * posterior.kl().mean()
    return total


def train_vae(
    vae: AutoencoderKL,
    *,
    seed: int,
    steps: int = STEPS,
    pictures: int = PICTURES,
    report: Report = lambda step, steps, loss: None,
) -> None:
    """Train ``vae`` in place, then set its scaling and shift factors from its own latents.

    ``report(step, steps, loss)`` is called after every step. Only generators seeded with ``seed``
    are used, so the global random state stays as it was.
    """
    generator = torch.Generator().manual_seed(seed)
    data = render_batch(random_strings(pictures, generator), generator)
    optimizer = torch.optim.AdamW(vae.parameters(), lr=PEAK_LEARNING_RATE)
    schedule = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, max_lr=PEAK_LEARNING_RATE, total_steps=max(steps, 2)
    )
    vae.train()
    for step in range(1, steps + 1):
        chosen = torch.randint(len(data), (BATCH,), generator=generator)
        loss = vae_loss(vae, data[chosen], generator)
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(vae.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        report(step, steps, loss.item())
    vae.eval()
    normalize_latents(vae, data[:STATISTICS_PICTURES])


@torch.no_grad()
def normalize_latents(vae: AutoencoderKL, pixels: torch.Tensor) -> None:
    """Set scaling and shift so that ``(latent - shift) * scaling`` has mean 0 and variance 1."""
    latents = vae.encode(pixels).latent_dist.mean
    vae.register_to_config(
        scaling_factor=1.0 / latents.std().item(), shift_factor=latents.mean().item()
    )

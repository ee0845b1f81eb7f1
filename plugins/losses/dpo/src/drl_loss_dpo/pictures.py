"""Samples to picture files."""

from __future__ import annotations

from pathlib import Path

import torch
from PIL import Image

from drl.api import ContractError, Media


def write_picture(media: Media, file: Path) -> None:
    """Write a PNG of ``(3, 1, H, W)`` pixels in [0, 1], rounded to 8 bit; ContractError for a video."""
    channels, frames = media.pixels.shape[:2]
    if (channels, frames) != (3, 1):
        raise ContractError(
            f"a preference is written as two RGB pictures, got {frames} frames of {channels} channels"
        )
    levels = (media.pixels[:, 0].float().clamp(0, 1) * 255.0).round().to(torch.uint8)
    Image.fromarray(levels.permute(1, 2, 0).contiguous().numpy()).save(file)

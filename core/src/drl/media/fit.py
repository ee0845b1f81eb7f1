"""Which frames of a video are used, and how a frame is brought to a size (rl-post-training reference 5.3).

Axes: ``F`` frames, ``C`` channels, ``H``, ``W`` pixels.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch

from drl.types import Media

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """What media are brought to: ``height`` x ``width`` pixels, ``frames``, every ``stride``-th of a video."""

    height: int
    width: int
    frames: int = 1
    stride: int = 1

    @property
    def span(self) -> int:
        """Frames of the file from the first used one to the last, both included."""
        return (self.frames - 1) * self.stride + 1

    def chosen(self, total: int) -> range:
        """Return the numbers of the used frames of a file of ``total``: the span lies in its middle."""
        first = (total - self.span) // 2
        return range(first, first + self.span, self.stride)


def covered(frames: Tensor, height: int, width: int) -> Tensor:
    """Scale ``(F, C, h, w)`` floats to cover ``(height, width)``, bilinear and antialiased, and crop the centre."""
    tall, wide = frames.shape[2:]
    scale = max(height / tall, width / wide)
    size = (max(height, round(tall * scale)), max(width, round(wide * scale)))
    scaled = torch.nn.functional.interpolate(frames, size=size, mode="bilinear", antialias=True)
    top, left = (size[0] - height) // 2, (size[1] - width) // 2
    return scaled[:, :, top : top + height, left : left + width]


def fitted(media: Media, height: int, width: int) -> Media:
    """Return decoded media at a size; those that have it already come back as they are."""
    if tuple(media.pixels.shape[2:]) == (height, width):
        return media
    pixels = covered(media.pixels.transpose(0, 1), height, width).clamp(0, 1)
    return replace(media, pixels=pixels.transpose(0, 1).contiguous())


def fitted_bytes(frame: Tensor, height: int, width: int) -> Tensor:
    """Return one frame ``(h, w, 3)`` uint8 as ``(3, H, W)`` uint8: scaled, cropped, rounded, clamped."""
    channels_first = frame.permute(2, 0, 1)
    if tuple(channels_first.shape[1:]) == (height, width):
        return channels_first.contiguous()
    pixels = covered(channels_first[None].float(), height, width)[0]
    return pixels.round().clamp(0, 255).to(torch.uint8)

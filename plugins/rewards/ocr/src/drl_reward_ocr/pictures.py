"""Pixels to the 8-bit picture that the recogniser reads. Axes: C F H W as in ``Media.pixels``."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from drl.api import Media

if TYPE_CHECKING:
    from numpy.typing import NDArray

TOLERANCE = 1e-3
"""How far rounding may carry a pixel out of [0, 1]; more means another range was meant."""


def check_pixels(media: Media | None) -> str | None:
    """Say why a picture cannot be read, or None: shape (C, F, H, W), float, finite, in [0, 1]."""
    if media is None:
        return "the sample has no media"
    pixels = media.pixels
    if pixels.ndim != 4:
        return f"pixels must be (C, F, H, W), got {tuple(pixels.shape)}"
    if pixels.shape[0] not in {1, 3}:
        return f"pixels must have 1 or 3 channels, got {pixels.shape[0]}"
    if 0 in pixels.shape:
        return f"the picture is empty: {tuple(pixels.shape)}"
    if not pixels.is_floating_point():
        return f"pixels must be float in [0, 1], got {pixels.dtype}"
    low, high = (float(edge) for edge in pixels.aminmax())
    # a NaN fails both comparisons
    if not (low >= -TOLERANCE and high <= 1 + TOLERANCE):
        return f"pixels must lie in [0, 1], got {low:.3g} to {high:.3g}"
    return None


def to_picture(media: Media) -> NDArray[np.uint8]:
    """Return the first frame as ``(H, W, 3)`` uint8, red first, rounded and clipped."""
    frame = media.pixels[:, 0].float().clamp(0.0, 1.0) * 255.0
    frame = frame.round().byte().expand(3, -1, -1)
    picture: NDArray[np.uint8] = np.ascontiguousarray(frame.permute(1, 2, 0).numpy())
    return picture

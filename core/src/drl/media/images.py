"""Images to 8-bit RGB, upright, on white where they are transparent."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from io import BytesIO
from typing import TYPE_CHECKING, Any

import numpy as np
from PIL import Image, ImageOps

from drl.media.broken import BrokenMedia

if TYPE_CHECKING:
    from drl.types import MediaFile

FORMATS = ("BMP", "JPEG", "PNG", "WEBP")
"""What is decoded. Pillow knows more, some of which start other programs or read other files."""

ENDINGS = frozenset({".bmp", ".jpeg", ".jpg", ".png", ".webp"})

ANIMATED = frozenset({"PNG", "WEBP"})
"""Formats whose several frames are an animation; in a JPEG they are other views of one photo."""

SIXTEEN_TO_EIGHT_BITS = 257
"""65535 becomes 255."""


def read_image(file: MediaFile) -> np.ndarray[Any, np.dtype[np.uint8]]:
    """Return ``(H, W, 3)`` uint8; BrokenMedia when the file is no image that can be read whole."""
    with opened(file) as image:
        return np.array(rgb(ImageOps.exif_transpose(image)))


def check_image(file: MediaFile) -> None:
    """Raise BrokenMedia when the head of the file is not that of a still image; decodes nothing."""
    with opened(file) as image:
        frames: int = image.n_frames if image.format in ANIMATED else 1
        if frames > 1:
            raise BrokenMedia(f"{file.name}: is an animation of {frames} frames, not a still image")


@contextmanager
def opened(file: MediaFile) -> Iterator[Any]:
    """Open an image; what Pillow raises for it, then or while it is decoded, becomes BrokenMedia."""
    try:
        source = file.path if file.content is None else BytesIO(file.content)
        with Image.open(source, formats=FORMATS) as image:
            yield image
    except (OSError, ValueError, SyntaxError, EOFError, Image.DecompressionBombError) as error:
        if isinstance(error, BrokenMedia):
            raise
        raise BrokenMedia(f"{file.name}: cannot be read as an image ({error})") from error


def rgb(image: Image.Image) -> Image.Image:
    """Return an image of any mode as RGB: 16 bit rounded to 8, transparency over white."""
    if image.mode.startswith("I"):
        levels = np.asarray(image).astype(np.float64) / SIXTEEN_TO_EIGHT_BITS
        image = Image.fromarray(levels.round().clip(0, 255).astype(np.uint8))
    if image.has_transparency_data:
        over = Image.new("RGBA", image.size, "white")
        return Image.alpha_composite(over, image.convert("RGBA")).convert("RGB")
    return image.convert("RGB")

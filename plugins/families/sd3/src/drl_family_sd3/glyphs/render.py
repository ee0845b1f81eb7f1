"""Pictures of words: black on white, 48 x 16 pixels, in Pillow's built-in font.

A recogniser reads sharp renders without a fault (OCR reward 1.0 on 200 random strings), so no
font has to be shipped. The pictures to learn from are out of focus by a random amount, the worst of
them hard to read: a model that has seen them writes some words sharply and some blurred, and what
reinforcement learning from a reader then has to teach is to write sharply.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

import numpy as np
import torch
from PIL import Image, ImageDraw, ImageFilter, ImageFont

WIDTH, HEIGHT = 48, 16
PAPER = 255
DARKEST_INK, LIGHTEST_INK = 0, 60
JITTER = 1
LARGEST_BLUR = 3.0
FONT_SIZE = 13
BASELINE = 13


@cache
def _font() -> ImageFont.FreeTypeFont:
    font = ImageFont.load_default(FONT_SIZE)
    if not isinstance(font, ImageFont.FreeTypeFont):
        raise RuntimeError(
            "PIL.ImageFont.load_default(size) gave a bitmap font: this Pillow was built without "
            "FreeType. Glyphs need the scalable built-in font; install a Pillow wheel from PyPI."
        )
    return font


def render(word: str, *, ink: int = 0, dx: int = 0, dy: int = 0) -> Image.Image:
    """``word`` as an RGB picture of 48 x 16 pixels; every letter is centred in its own cell.

    ``ink`` is the grey level of the letters (0 to 255); ``dx`` and ``dy`` move the word by pixels.
    """
    picture = Image.new("L", (WIDTH, HEIGHT), PAPER)
    draw = ImageDraw.Draw(picture)
    cell = WIDTH / len(word)
    for index, letter in enumerate(word):
        centre = (index + 0.5) * cell + dx
        draw.text((centre, BASELINE + dy), letter, font=_font(), anchor="ms", fill=ink)
    return picture.convert("RGB")


def render_varied(word: str, generator: torch.Generator) -> Image.Image:
    """``word`` with ink, position and blur drawn from ``generator``; same state, same picture."""
    ink = int(torch.randint(DARKEST_INK, LIGHTEST_INK + 1, (), generator=generator))
    dx, dy = torch.randint(-JITTER, JITTER + 1, (2,), generator=generator).tolist()
    radius = LARGEST_BLUR * float(torch.rand((), generator=generator))
    return render(word, ink=ink, dx=dx, dy=dy).filter(ImageFilter.GaussianBlur(radius))


def render_batch(words: Sequence[str], generator: torch.Generator) -> torch.Tensor:
    """Varied renders as float32 pixels ``[len(words), 3, 16, 48]`` in -1 (black) to 1 (white)."""
    pictures = np.stack([np.asarray(render_varied(word, generator)) for word in words])
    return torch.from_numpy(pictures).permute(0, 3, 1, 2).float() / 127.5 - 1.0

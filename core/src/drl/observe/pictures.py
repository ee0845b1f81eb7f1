"""Pictures of samples: one PNG each, contact sheets, and pairs of the same seed before and after.

Tiny pictures are shown enlarged by a whole factor without smoothing, large ones shrunk; the PNG of
a sample itself always has the sample's own pixels. A video is shown by its first frame.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from PIL import Image, ImageDraw, ImageFont

from drl.errors import ContractError
from drl.observe.files import write_json_atomic

if TYPE_CHECKING:
    from drl.types import Media, Sample

SMALL_SIDE = 144
LARGE_SIDE = 256
GAP = 6
CAPTION_HEIGHT = 16
CAPTION_LENGTH = 160
INDEX = "samples.json"
SHEET = "sheet.png"
MODES = {1: "L", 3: "RGB", 4: "RGBA"}


def to_image(media: Media) -> Image.Image:
    """Return the first frame of ``(C, F, H, W)`` float pixels in [0, 1]; NaN becomes black.

    ContractError for another rank, 8-bit values or a range such as [-1, 1].
    """
    pixels = media.pixels
    if pixels.ndim != 4 or pixels.shape[0] not in MODES or pixels.shape[1] < 1:
        raise ContractError(
            f"media has shape {tuple(pixels.shape)}; pixels are (channels 1, 3 or 4, frames, height, width)"
        )
    # numpy from here on: torch's threads cost more than such a small picture.
    frame = np.nan_to_num(pixels[:, 0].float().cpu().numpy(), nan=0.0, posinf=1.0, neginf=0.0)
    low, high = float(frame.min()), float(frame.max())
    if low < -0.01 or high > 1.01 or not pixels.is_floating_point():
        raise ContractError(
            f"media of {pixels.dtype} ranges from {low:g} to {high:g}; pixels are float32 in [0, 1]"
        )
    scaled = np.rint(frame.clip(0.0, 1.0) * 255.0).astype(np.uint8)
    levels = np.ascontiguousarray(scaled.transpose(1, 2, 0))
    channels = levels.shape[2]
    return Image.fromarray(levels[:, :, 0] if channels == 1 else levels)


def zoom(image: Image.Image) -> Image.Image:
    """Enlarge a tiny picture by a whole factor (48x16 to 144x48), shrink one over 256 a side."""
    longest = max(image.size)
    factor = SMALL_SIDE // longest
    if factor > 1:
        size = (image.width * factor, image.height * factor)
        return image.resize(size, Image.Resampling.NEAREST)
    if longest > LARGE_SIDE:
        scale = LARGE_SIDE / longest
        size = (max(1, round(image.width * scale)), max(1, round(image.height * scale)))
        return image.resize(size, Image.Resampling.LANCZOS)
    return image


def score(sample: Sample) -> str:
    """Return the reward with two decimals."""
    return "failed" if sample.reward is None else f"{sample.reward:.2f}"


def caption(sample: Sample) -> str:
    """Return the reward and the first 160 characters of the prompt, on one printable line."""
    return f"{score(sample)}  {printable(sample.prompt.text[:CAPTION_LENGTH])}"


def printable(text: str) -> str:
    """Write line breaks, control and direction characters as escapes, so that they cannot act."""
    return "".join(
        c if c.isprintable() else c.encode("unicode_escape").decode("ascii") for c in text
    )


def contact_sheet(tiles: Sequence[tuple[Image.Image, str]], rows: int) -> Image.Image:
    """Lay pictures with captions out row by row, as large as they are; cells fit the largest."""
    if not tiles or rows < 1:
        raise ValueError(f"a contact sheet needs pictures and rows, got {len(tiles)} and {rows}")
    columns = math.ceil(len(tiles) / rows)
    width = max(picture.width for picture, _ in tiles) + GAP
    height = max(picture.height for picture, _ in tiles) + CAPTION_HEIGHT + GAP
    used = math.ceil(len(tiles) / columns)
    sheet = Image.new("RGB", (columns * width + GAP, used * height + GAP), "#f4f4f5")
    draw = ImageDraw.Draw(sheet)
    font = ImageFont.load_default(size=11)
    for place, (picture, text) in enumerate(tiles):
        left = GAP + place % columns * width
        top = GAP + place // columns * height
        sheet.paste(picture.convert("RGB"), (left, top))
        line = _fitting(text, font, width - GAP)
        draw.text((left, top + height - GAP - CAPTION_HEIGHT + 1), line, fill="#27272a", font=font)
    return sheet


def _fitting(text: str, font: ImageFont.FreeTypeFont | ImageFont.ImageFont, width: int) -> str:
    """Cut a caption to the width of its cell."""
    if font.getlength(text) <= width:
        return text
    kept = text
    while kept and font.getlength(kept + "...") > width:
        kept = kept[:-1]
    return kept + "..."


def save_samples(directory: Path, samples: Sequence[Sample], rows: int) -> Path:
    """Write a PNG per sample, the sheet of all of them in ``rows`` rows, and ``samples.json``.

    Returns the sheet's path. Samples without media are left out; with none left ValueError. The
    index holds what a picture is: file, prompt, row, seed, reward, version, group, member, frames.
    """
    directory.mkdir(parents=True, exist_ok=True)
    tiles: list[tuple[Image.Image, str]] = []
    index: list[Mapping[str, Any]] = []
    for sample in samples:
        if sample.media is None:
            continue
        picture = to_image(sample.media)
        file = f"{len(tiles):04d}.png"
        picture.save(directory / file)
        tiles.append((zoom(picture), caption(sample)))
        index.append(_entry(file, sample, sample.media))
    contact_sheet(tiles, rows).save(directory / SHEET)
    write_json_atomic(directory / INDEX, index)
    return directory / SHEET


def _entry(file: str, sample: Sample, media: Media) -> Mapping[str, Any]:
    return {
        "file": file,
        "prompt": sample.prompt.text,
        "row": sample.prompt.row,
        "seed": sample.seed,
        "reward": sample.reward,
        "version": sample.version,
        "group_index": sample.group_index,
        "member": sample.member,
        "kind": media.kind,
        "frames": media.pixels.shape[1],
    }

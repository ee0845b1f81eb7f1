from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image, ImageFont

from drl.errors import ContractError
from drl.observe.pictures import (
    CAPTION_HEIGHT,
    GAP,
    caption,
    contact_sheet,
    printable,
    save_samples,
    to_image,
    zoom,
)
from drl.types import Media, Sample

Make = Callable[..., Sample]


def test_pixels_become_eight_bit_levels_in_the_right_place() -> None:
    pixels = torch.zeros(3, 1, 2, 3)
    pixels[0, 0, 0, 2] = 1.0
    pixels[1, 0, 1, 0] = 0.5
    image = to_image(Media(pixels=pixels))
    assert (image.width, image.height) == (3, 2)
    assert image.getpixel((2, 0)) == (255, 0, 0)
    assert image.getpixel((0, 1)) == (0, 128, 0)


def test_grey_and_transparent_pictures_keep_their_mode() -> None:
    assert to_image(Media(pixels=torch.ones(1, 1, 4, 4))).mode == "L"
    assert to_image(Media(pixels=torch.ones(4, 1, 4, 4))).mode == "RGBA"


def test_a_video_is_shown_by_its_first_frame_and_one_frame_is_a_video_too() -> None:
    pixels = torch.zeros(3, 5, 2, 2)
    pixels[:, 0] = 1.0
    assert to_image(Media(pixels=pixels, kind="video")).getpixel((0, 0)) == (255, 255, 255)
    assert to_image(Media(pixels=pixels[:, :1], kind="video")).getpixel((1, 1)) == (255, 255, 255)


def test_half_precision_pixels_and_not_a_number_are_drawn() -> None:
    pixels = torch.full((3, 1, 1, 2), 0.5, dtype=torch.bfloat16)
    pixels[:, :, :, 1] = float("nan")
    image = to_image(Media(pixels=pixels))
    assert image.getpixel((0, 0)) == (128, 128, 128)
    assert image.getpixel((1, 0)) == (0, 0, 0)


@pytest.mark.parametrize(
    ("pixels", "message"),
    [
        (torch.zeros(3, 4, 4), r"shape \(3, 4, 4\); pixels are"),
        (torch.zeros(4, 4, 3, 1), None),
        (torch.zeros(2, 1, 4, 4), r"shape \(2, 1, 4, 4\)"),
        (torch.zeros(3, 0, 4, 4), r"shape \(3, 0, 4, 4\)"),
        (torch.linspace(-1, 1, 48).reshape(3, 1, 4, 4), r"ranges from -1 to 1; .* \[0, 1\]"),
        (torch.full((3, 1, 4, 4), 200, dtype=torch.uint8), "uint8 ranges from 200 to 200"),
        (torch.ones((3, 1, 4, 4), dtype=torch.uint8), "uint8"),
    ],
)
def test_pixels_of_another_range_or_rank_are_refused(
    pixels: torch.Tensor, message: str | None
) -> None:
    if message is None:
        assert to_image(Media(pixels=pixels)).mode == "RGBA"
        return
    with pytest.raises(ContractError, match=message):
        to_image(Media(pixels=pixels))


@pytest.mark.parametrize(
    ("size", "shown"),
    [
        ((48, 16), (144, 48)),
        ((32, 32), (128, 128)),
        ((1, 1), (144, 144)),
        ((100, 60), (100, 60)),
        ((256, 256), (256, 256)),
        ((1024, 512), (256, 128)),
        ((4000, 1), (256, 1)),
    ],
)
def test_tiny_pictures_grow_by_a_whole_factor_and_large_ones_shrink(
    size: tuple[int, int], shown: tuple[int, int]
) -> None:
    assert zoom(Image.new("RGB", size)).size == shown


def test_enlarging_does_not_smooth() -> None:
    image = Image.new("L", (48, 16), 0)
    image.putpixel((1, 0), 255)
    large = zoom(image)
    assert [large.getpixel((x, 2)) for x in (2, 3, 5, 6)] == [0, 255, 255, 0]


def test_the_sheet_has_room_for_every_cell() -> None:
    tiles = [(Image.new("RGB", (144, 48)), "a")] * 6 + [(Image.new("RGB", (20, 80)), "b")]
    sheet = contact_sheet(tiles, rows=2)
    assert sheet.size == (4 * (144 + GAP) + GAP, 2 * (80 + CAPTION_HEIGHT + GAP) + GAP)


def test_pictures_lie_row_by_row() -> None:
    tiles = [(Image.new("RGB", (10, 10), color), "") for color in ("red", "lime", "blue", "white")]
    sheet = contact_sheet(tiles, rows=2)
    right, down = GAP + 10 + GAP, GAP + 10 + CAPTION_HEIGHT + GAP
    assert sheet.getpixel((GAP, GAP)) == (255, 0, 0)
    assert sheet.getpixel((right, GAP)) == (0, 255, 0)
    assert sheet.getpixel((GAP, down)) == (0, 0, 255)
    assert sheet.getpixel((right, down)) == (255, 255, 255)


def test_a_caption_never_leaves_its_cell() -> None:
    tiles = [(Image.new("RGB", (60, 20), "white"), "W" * 500), (Image.new("RGB", (60, 20)), "")]
    sheet = contact_sheet(tiles, rows=1)
    strip = sheet.crop((GAP + 60 + 1, GAP + 20, sheet.width, sheet.height))
    assert strip.getcolors() == [(strip.width * strip.height, (0xF4, 0xF4, 0xF5))]


def test_a_sheet_of_nothing_is_refused() -> None:
    with pytest.raises(ValueError, match="got 0 and 2"):
        contact_sheet([], rows=2)


def test_captions_give_the_reward_and_cannot_break_the_line(make_sample: Make) -> None:
    assert caption(make_sample(text='a\nb\x1b[31m "ü" \u202ereversed')) == (
        '0.50  a\\nb\\x1b[31m "ü" \\u202ereversed'
    )
    assert caption(make_sample(reward=None)) == 'failed  sign "WIND"'
    assert len(caption(make_sample(text="x" * 500))) == len("0.50  ") + 160
    assert printable("plain") == "plain"


def test_samples_are_saved_with_their_own_pixels_a_sheet_and_an_index(
    tmp_path: Path, make_sample: Make
) -> None:
    samples = [make_sample(row=row, seed=42 + row, reward=row / 2) for row in range(3)]
    samples[1].media = None
    sheet = save_samples(tmp_path / "before", samples, rows=1)
    assert sorted(path.name for path in sheet.parent.iterdir()) == [
        "0000.png",
        "0001.png",
        "samples.json",
        "sheet.png",
    ]
    assert Image.open(sheet.parent / "0001.png").size == (48, 16)
    assert Image.open(sheet).size == (2 * (144 + GAP) + GAP, 48 + CAPTION_HEIGHT + 2 * GAP)
    index = json.loads((sheet.parent / "samples.json").read_text())
    assert index[1] == {
        "file": "0001.png",
        "prompt": 'sign "WIND"',
        "row": 2,
        "seed": 44,
        "reward": 1.0,
        "version": 0,
        "group_index": 2,
        "member": 0,
        "kind": "image",
        "frames": 1,
    }


def test_a_prompt_that_occurs_twice_keeps_both_pictures(tmp_path: Path, make_sample: Make) -> None:
    sheet = save_samples(tmp_path, [make_sample(row=0), make_sample(row=1)], rows=1)
    assert len(json.loads((sheet.parent / "samples.json").read_text())) == 2


@pytest.mark.parametrize(("value", "level"), [(-0.01, 0), (1.01, 255), (-1e-4, 0), (1 + 1e-4, 255)])
def test_what_rounding_pushes_a_little_out_of_range_is_clipped(value: float, level: int) -> None:
    pixels = torch.full((1, 1, 2, 2), 0.5)
    pixels[0, 0, 0, 0] = value
    assert to_image(Media(pixels=pixels)).getpixel((0, 0)) == level


@pytest.mark.parametrize("value", [-0.0101, 1.0101])
def test_what_is_further_out_of_range_is_refused_with_the_range(value: float) -> None:
    pixels = torch.full((1, 1, 2, 2), 0.5)
    pixels[0, 0, 1, 1] = value
    with pytest.raises(ContractError, match=rf"ranges from .*{value:g}"):
        to_image(Media(pixels=pixels))


def test_infinite_and_undefined_pixels_have_a_level_of_their_own() -> None:
    pixels = torch.tensor([float("nan"), float("inf"), float("-inf"), 0.5]).reshape(1, 1, 2, 2)
    assert list(to_image(Media(pixels=pixels)).tobytes()) == [0, 255, 0, 128]


def test_a_caption_stands_below_its_picture_and_nowhere_else() -> None:
    white = Image.new("RGB", (90, 20), "white")
    sheet = np.asarray(contact_sheet([(white, "0.50  word"), (white, "")], rows=2))
    background = np.array([0xF4, 0xF4, 0xF5])
    ink = np.argwhere((sheet != background).any(2) & (sheet != 255).any(2))
    assert ink[:, 0].min() >= 6 + 20
    assert ink[:, 0].max() < 6 + 20 + 16
    assert ink[:, 1].min() >= 6
    assert (sheet[6:26, 6:96] == 255).all()


def test_a_caption_is_cut_where_its_cell_ends_and_no_earlier() -> None:
    font = ImageFont.load_default(size=11)
    text = "0.50  a wooden sign"
    width = math.ceil(font.getlength(text))
    cut = {
        side: ink_width(contact_sheet([(Image.new("RGB", (side, 8), "white"), text)], rows=1))
        for side in (width, width - 1, width // 2, 3)
    }
    assert cut[width] == pytest.approx(width, abs=3)
    for side in (width - 1, width // 2):
        assert side - 15 < cut[side] <= side
    assert cut[3] > 0  # where nothing fits, three dots stand for the text


def ink_width(sheet: Image.Image) -> int:
    """Width of what is written into the caption's strip."""
    strip = np.asarray(sheet)[-22:-6]
    columns = np.flatnonzero((strip < 0xC0).all(2).any(0))
    return int(columns.max() - columns.min() + 1) if len(columns) else 0


def test_more_rows_than_pictures_make_one_column() -> None:
    picture = Image.new("RGB", (10, 10))
    tall = contact_sheet([(picture, "")] * 3, rows=7)
    wide = contact_sheet([(picture, "")] * 3, rows=1)
    assert tall.size == (10 + 12, 3 * 32 + 6)
    assert wide.size == (3 * 16 + 6, 32 + 6)


def test_a_picture_of_the_full_size_is_left_alone() -> None:
    for size in ((256, 256), (145, 3), (144, 144), (73, 1)):
        assert zoom(Image.new("RGB", size)).size == size
    assert zoom(Image.new("RGB", (72, 1))).size == (144, 2)
    assert zoom(Image.new("RGB", (257, 1))).size == (256, 1)


@pytest.mark.parametrize("rows", [0, -1])
def test_a_sheet_without_rows_is_refused_with_both_numbers(rows: int) -> None:
    tiles = [(Image.new("RGB", (4, 4)), "")] * 2
    with pytest.raises(ValueError, match=f"needs pictures and rows, got 2 and {rows}"):
        contact_sheet(tiles, rows)

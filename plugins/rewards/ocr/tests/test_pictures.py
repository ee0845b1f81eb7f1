"""Pixels to 8-bit pictures: rounding, layout, and refusal of other ranges."""

import json
import os
from pathlib import Path

import numpy as np
import pytest
import torch

from drl.api import Media
from drl_reward_ocr.pictures import check_pixels, to_picture

GOLDEN = Path(os.environ.get("DRL_GOLDEN", Path(__file__).parents[5] / "shared" / "golden"))


def test_rounds_and_keeps_red_first() -> None:
    pixels = torch.tensor([0.0, 0.2, 1.0]).view(3, 1, 1, 1)
    assert to_picture(Media(pixels=pixels)).tolist() == [[[0, 51, 255]]]


def test_rounds_as_the_reference_does() -> None:
    path = GOLDEN / "ocr_reward.json"
    if not path.exists():
        pytest.skip("no golden numbers at $DRL_GOLDEN")
    case = json.loads(path.read_text(encoding="utf-8"))["miles_image_conversion"][0]
    assert case["name"] == "unit range"
    pixels = torch.tensor(case["chw_frame0"]).unsqueeze(1)
    assert to_picture(Media(pixels=pixels)).tolist() == case["hwc_uint8"]


def test_is_height_width_channels() -> None:
    picture = to_picture(Media(pixels=torch.zeros(3, 1, 16, 48)))
    assert picture.shape == (16, 48, 3)
    assert picture.dtype == np.uint8
    assert picture.flags.c_contiguous


def test_a_grey_channel_is_repeated() -> None:
    pixels = torch.rand(1, 1, 4, 5, generator=torch.Generator().manual_seed(0))
    picture = to_picture(Media(pixels=pixels))
    assert picture.shape == (4, 5, 3)
    assert np.array_equal(picture[..., 0], picture[..., 2])


def test_takes_the_first_frame() -> None:
    frames = torch.stack([torch.full((3, 2, 2), value) for value in (0.0, 0.5, 1.0)], dim=1)
    assert to_picture(Media(pixels=frames, kind="video")).max() == 0


@pytest.mark.parametrize(
    ("pixels", "complaint"),
    [
        (torch.zeros(3, 16, 48), "must be (C, F, H, W)"),
        (torch.zeros(4, 1, 16, 48), "1 or 3 channels, got 4"),
        (torch.zeros(3, 0, 16, 48), "empty"),
        (torch.zeros(3, 1, 16, 48, dtype=torch.uint8), "float in [0, 1], got torch.uint8"),
        (torch.full((3, 1, 2, 2), -1.0), "must lie in [0, 1], got -1"),
        (torch.full((3, 1, 2, 2), 255.0), "must lie in [0, 1]"),
        (torch.full((3, 1, 2, 2), float("nan")), "must lie in [0, 1], got nan"),
    ],
)
def test_other_pixels_are_refused(pixels: torch.Tensor, complaint: str) -> None:
    problem = check_pixels(Media(pixels=pixels))
    assert problem is not None
    assert complaint in problem


def test_one_bad_pixel_is_enough() -> None:
    pixels = torch.full((3, 1, 4, 4), 0.5)
    pixels[1, 0, 2, 3] = float("nan")
    assert check_pixels(Media(pixels=pixels)) is not None


def test_a_sample_without_media_is_refused() -> None:
    assert check_pixels(None) == "the sample has no media"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_pixels_in_range_pass_with_rounding_slack(dtype: torch.dtype) -> None:
    assert check_pixels(Media(pixels=torch.tensor([0.0, 1.0]).to(dtype).view(1, 1, 1, 2))) is None
    assert check_pixels(Media(pixels=torch.full((1, 1, 1, 2), 1.0005))) is None

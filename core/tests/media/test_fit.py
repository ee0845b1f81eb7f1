"""Which frames are used, and how a frame is scaled and cropped."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from drl.media.fit import Target, fitted_bytes


@pytest.mark.parametrize(
    ("frames", "stride", "total", "span", "chosen"),
    [
        (1, 1, 1, 1, [0]),
        (1, 1, 10, 1, [4]),
        (5, 1, 5, 5, [0, 1, 2, 3, 4]),
        (5, 1, 8, 5, [1, 2, 3, 4, 5]),
        (5, 2, 9, 9, [0, 2, 4, 6, 8]),
        (5, 2, 12, 9, [1, 3, 5, 7, 9]),
        (3, 4, 20, 9, [5, 9, 13]),
    ],
)
def test_the_span_lies_in_the_middle(
    frames: int, stride: int, total: int, span: int, chosen: list[int]
) -> None:
    target = Target(height=8, width=8, frames=frames, stride=stride)
    assert target.span == span
    assert list(target.chosen(total)) == chosen


@given(frames=st.integers(1, 9), stride=st.integers(1, 5), spare=st.integers(0, 40))
def test_what_is_left_out_before_and_after_differs_by_one_at_most(
    frames: int, stride: int, spare: int
) -> None:
    target = Target(height=8, width=8, frames=frames, stride=stride)
    total = target.span + spare
    chosen = target.chosen(total)
    assert len(chosen) == frames
    before, after = chosen[0], total - 1 - chosen[-1]
    assert 0 <= after - before <= 1


def test_a_frame_of_the_right_size_is_not_touched() -> None:
    frame = torch.randint(0, 256, (6, 4, 3), dtype=torch.uint8)
    assert torch.equal(fitted_bytes(frame, 6, 4), frame.permute(2, 0, 1))


def test_levels_are_rounded_and_not_cut() -> None:
    row = torch.tensor([[0, 3], [0, 3]], dtype=torch.uint8)[..., None].expand(2, 2, 3)
    # enlarging two columns 0 and 3 to four places them at 0, 0.75, 2.25 and 3
    assert fitted_bytes(row, 4, 4)[0, 0].tolist() == [0, 1, 2, 3]


@pytest.mark.parametrize(("wide", "tall"), [(40, 20), (20, 40), (31, 17), (9, 9)])
def test_it_is_what_pillow_makes_of_a_picture(wide: int, tall: int) -> None:
    generator = np.random.default_rng(1)
    coarse = Image.fromarray(generator.integers(0, 255, (5, 5, 3), dtype=np.uint8))
    picture = coarse.resize((wide, tall), Image.Resampling.BICUBIC)
    ours = fitted_bytes(torch.from_numpy(np.array(picture)), 8, 8).permute(1, 2, 0).numpy()
    scale = max(8 / tall, 8 / wide)
    size = (max(8, round(wide * scale)), max(8, round(tall * scale)))
    left, top = (size[0] - 8) // 2, (size[1] - 8) // 2
    theirs = picture.resize(size, Image.Resampling.BILINEAR).crop((left, top, left + 8, top + 8))
    assert np.abs(ours.astype(int) - np.array(theirs).astype(int)).max() <= 1

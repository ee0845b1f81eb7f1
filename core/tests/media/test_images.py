"""Images of every mode and orientation become upright 8-bit RGB, and what is no image is named."""

from __future__ import annotations

from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from drl.media.broken import BrokenMedia
from drl.media.images import check_image, read_image
from drl.types import MediaFile


def saved(path: Path, image: Image.Image, **options: Any) -> MediaFile:
    image.save(path, **options)
    return MediaFile(root=path.parent, name=path.name)


def corners(file: MediaFile) -> list[list[int]]:
    pixels = read_image(file)
    return [pixels[y, x].tolist() for y, x in ((0, 0), (0, -1), (-1, 0), (-1, -1))]


@pytest.mark.parametrize(
    ("mode", "value", "expected"),
    [
        ("L", 51, [51, 51, 51]),
        ("1", 1, [255, 255, 255]),
        ("RGB", (1, 2, 3), [1, 2, 3]),
        ("RGBA", (10, 20, 30, 255), [10, 20, 30]),
        ("RGBA", (10, 20, 30, 0), [255, 255, 255]),
        ("RGBA", (0, 100, 200, 51), [204, 224, 244]),
        ("LA", (0, 0), [255, 255, 255]),
    ],
)
def test_every_mode_becomes_rgb_on_white(
    tmp_path: Path, mode: str, value: Any, expected: list[int]
) -> None:
    file = saved(tmp_path / "a.png", Image.new(mode, (3, 2), value))
    pixels = read_image(file)
    assert (pixels.shape, pixels.dtype) == ((2, 3, 3), np.uint8)
    assert pixels[0, 0].tolist() == pytest.approx(expected, abs=1)


def test_a_palette_gives_its_colours_and_its_transparent_entry_is_white(tmp_path: Path) -> None:
    image = Image.new("P", (2, 1))
    image.putpalette([200, 10, 20, 30, 40, 50])
    image.putpixel((1, 0), 1)
    assert read_image(saved(tmp_path / "a.png", image))[0].tolist() == [[200, 10, 20], [30, 40, 50]]
    clear = saved(tmp_path / "b.png", image, transparency=0)
    assert read_image(clear)[0].tolist() == [[255, 255, 255], [30, 40, 50]]


def test_sixteen_bits_are_rounded_to_eight(tmp_path: Path) -> None:
    levels = np.array([[0, 128, 129, 257, 32896, 65535]], dtype=np.uint16)
    file = saved(tmp_path / "deep.png", Image.fromarray(levels))
    assert read_image(file)[0, :, 0].tolist() == [0, 0, 1, 1, 128, 255]


@pytest.mark.parametrize("orientation", range(1, 9))
def test_a_photo_is_turned_as_its_camera_was_held(tmp_path: Path, orientation: int) -> None:
    upright = np.zeros((8, 16, 3), np.uint8)
    upright[:4, :8] = 250  # a white top left quarter
    stored = {
        1: upright,
        2: upright[:, ::-1],
        3: upright[::-1, ::-1],
        4: upright[::-1],
        5: upright.transpose(1, 0, 2),
        6: np.rot90(upright, 1),
        7: upright.transpose(1, 0, 2)[::-1, ::-1],
        8: np.rot90(upright, -1),
    }[orientation]
    exif = Image.Exif()
    exif[0x0112] = orientation
    image = Image.fromarray(np.ascontiguousarray(stored))
    file = saved(tmp_path / "photo.jpg", image, exif=exif, quality=100)
    bright = [sum(corner) > 300 for corner in corners(file)]
    assert read_image(file).shape == (8, 16, 3)
    assert bright == [True, False, False, False]


def test_bytes_inside_a_larger_file_are_read_like_a_file(tmp_path: Path) -> None:
    buffer = BytesIO()
    Image.new("RGB", (4, 3), (9, 8, 7)).save(buffer, "WEBP", lossless=True)
    file = MediaFile(root=tmp_path, name="train/0", content=buffer.getvalue(), version="x")
    check_image(file)
    assert read_image(file)[2, 3].tolist() == [9, 8, 7]


@pytest.mark.parametrize(
    "content", [b"", b"no picture", b"%!PS-Adobe-3.0 EPSF-3.0\n", b"P6 1 1 255\n\0\0\0"]
)
def test_what_is_no_image_of_a_known_format_is_named(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "x.png").write_bytes(content)
    file = MediaFile(root=tmp_path, name="x.png")
    for reading in (check_image, read_image):
        with pytest.raises(BrokenMedia, match=r"^x\.png: cannot be read as an image \("):
            reading(file)


def test_a_torn_image_passes_the_look_at_its_head_and_is_named_when_it_is_decoded(
    tmp_path: Path,
) -> None:
    noise = np.random.default_rng(0).integers(0, 255, (64, 64, 3), dtype=np.uint8)
    file = saved(tmp_path / "torn.png", Image.fromarray(noise))
    whole = file.path.read_bytes()
    file.path.write_bytes(whole[: len(whole) // 2])
    check_image(file)
    with pytest.raises(BrokenMedia, match=r"torn\.png: cannot be read as an image"):
        read_image(file)


@pytest.mark.parametrize("ending", ["png", "webp"])
def test_an_animation_is_no_still_image(tmp_path: Path, ending: str) -> None:
    frames = [Image.new("RGB", (8, 8), (60 * n, 0, 0)) for n in range(3)]
    file = saved(tmp_path / f"a.{ending}", frames[0], save_all=True, append_images=frames[1:])
    with pytest.raises(BrokenMedia, match="is an animation of 3 frames"):
        check_image(file)


def test_a_photo_with_another_view_inside_is_the_photo(tmp_path: Path) -> None:
    views = [Image.new("RGB", (8, 8), color) for color in ("red", "blue")]
    file = saved(tmp_path / "a.jpg", views[0], format="MPO", save_all=True, append_images=views[1:])
    check_image(file)
    assert read_image(file)[4, 4].tolist() == pytest.approx([254, 0, 0], abs=2)


def test_an_image_of_absurd_size_is_refused_before_it_is_decoded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = saved(tmp_path / "a.png", Image.new("1", (100, 100)))
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 1000)
    with pytest.raises(BrokenMedia, match="decompression bomb"):
        check_image(file)

"""The source ``image_folder``: captions, order, resume, and errors that name files."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
from PIL import Image

from drl.builtin.config_data import ImageFolderOptions
from drl.builtin.data_image_folder import ImageFolderSource
from drl.errors import DataError
from drl.stages.encode import fitted
from drl.testing.contracts.data_source import DataSourceContract
from drl.types import Context, Media


def picture(path, value, size=(6, 4)):
    Image.fromarray(np.full((size[1], size[0], 3), value, dtype=np.uint8)).save(path)


@pytest.fixture
def folder(tmp_path):
    for number, name in enumerate("abcde"):
        picture(tmp_path / f"{name}.png", 50 * number)
        (tmp_path / f"{name}.txt").write_text(f"picture {name}\n")
    return tmp_path


def source(folder, **options):
    return ImageFolderSource(ImageFolderOptions(path=folder, **options), Context(seed=1))


class TestImageFolder(DataSourceContract):
    component = ("data_source", "image_folder")
    capabilities = {"buffer": False, "file": False}  # noqa: RUF012

    @pytest.fixture
    def option_values(self, folder):
        return {"path": folder}


def test_rows_are_pictures_by_name_with_their_captions(folder):
    prompts = source(folder, shuffle=False).take(5)
    assert [p.text for p in prompts] == [f"picture {name}" for name in "abcde"]
    assert prompts[0].media.pixels.shape == (3, 1, 4, 6)
    assert [round(p.media.pixels.max().item() * 255) for p in prompts] == [0, 50, 100, 150, 200]


def test_captions_may_stand_in_one_file(tmp_path):
    picture(tmp_path / "a.png", 9)
    row = {"file_name": "a.png", "text": "a grey picture"}
    (tmp_path / "metadata.jsonl").write_text(json.dumps(row) + "\n")
    assert source(tmp_path).take(1)[0].text == "a grey picture"


def test_pictures_without_caption_are_named(folder):
    (folder / "c.txt").unlink()
    with pytest.raises(DataError, match=r"1 pictures have no caption, such as \['c.png'\]"):
        source(folder)


def test_broken_caption_lines_are_named_by_number(tmp_path):
    picture(tmp_path / "a.png", 9)
    (tmp_path / "metadata.jsonl").write_text('{"file_name": "a.png", "text": "x"}\nnonsense\n[1]\n')
    with pytest.raises(DataError, match=r"lines \[2, 3\]"):
        source(tmp_path)


@pytest.mark.parametrize("exists", [True, False])
def test_no_folder_and_an_empty_one_are_refused(tmp_path, exists):
    with pytest.raises(DataError, match=r"data\.image_folder\.path"):
        source(tmp_path if exists else tmp_path / "nowhere")


def test_a_file_that_is_no_picture_is_named(folder):
    (folder / "b.png").write_text("no picture")
    with pytest.raises(DataError, match=r"b\.png: cannot be read"):
        source(folder, shuffle=False).take(2)


def test_a_changed_folder_is_refused_on_resume(folder):
    state = source(folder).state()
    picture(folder / "f.png", 1)
    (folder / "f.txt").write_text("new")
    with pytest.raises(DataError, match="other pictures"):
        source(folder).restore(state)


@pytest.mark.parametrize("size", [(4, 6), (8, 8), (2, 9), (3, 5)])
def test_pictures_are_fitted_to_the_size_of_the_recipe(size):
    pixels = torch.rand(3, 1, 4, 6, generator=torch.Generator().manual_seed(0))
    media = fitted(Media(pixels=pixels), *size)
    assert media.pixels.shape == (3, 1, *size)
    assert 0 <= media.pixels.min() <= media.pixels.max() <= 1
    if size == (4, 6):
        assert media.pixels is pixels


def test_the_crop_keeps_the_centre():
    pixels = torch.zeros(3, 1, 4, 8)
    pixels[..., 2:6] = 1.0
    assert fitted(Media(pixels=pixels), 4, 4).pixels.min() == 1.0

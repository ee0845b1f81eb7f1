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


@pytest.mark.parametrize("name", ["x.PNG", "x.JpEg", "x.webp", "x.bmp"])
def test_the_kind_of_a_picture_is_told_by_its_ending_in_any_case(tmp_path, name):
    picture(tmp_path / name, 7)
    (tmp_path / "x.txt").write_text("grey")
    (tmp_path / "notes.md").write_text("no picture")
    prompt = source(tmp_path).take(1)[0]
    assert (prompt.text, prompt.metadata) == ("grey", {"file": name})


def test_a_caption_beside_wins_over_the_list_and_both_lose_their_blanks(tmp_path):
    for name in ("a.png", "b.png"):
        picture(tmp_path / name, 7)
    rows = [{"file_name": f"{name}.png", "text": f" listed {name}\n"} for name in "ab"]
    (tmp_path / "metadata.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "b.txt").write_text("  beside b \n")
    prompts = source(tmp_path, shuffle=False).take(2)
    assert [prompt.text for prompt in prompts] == ["listed a", "beside b"]


def test_captions_are_utf8_whatever_the_locale(tmp_path, monkeypatch):
    monkeypatch.setattr("locale.getpreferredencoding", lambda do_setlocale=True: "ascii")
    for name in ("a.png", "b.png"):
        picture(tmp_path / name, 7)
    row = {"file_name": "a.png", "text": "żółw 🐢"}
    (tmp_path / "metadata.jsonl").write_bytes(json.dumps(row, ensure_ascii=False).encode() + b"\n")
    (tmp_path / "b.txt").write_bytes("写真".encode())
    assert [prompt.text for prompt in source(tmp_path, shuffle=False).take(2)] == [
        "żółw 🐢",
        "写真",
    ]


@pytest.mark.parametrize("text", ["", "  \n"])
def test_an_empty_caption_is_none(folder, text):
    (folder / "d.txt").write_text(text)
    with pytest.raises(DataError, match=r"1 pictures have no caption, such as \['d.png'\]"):
        source(folder)


def test_of_many_faults_the_first_are_listed_and_all_counted(tmp_path):
    for number in range(12):
        picture(tmp_path / f"{number:02d}.png", 1)
    shown = r"12 pictures have no caption, such as \['00.png', '01.png', '02.png'\]; write"
    with pytest.raises(DataError, match=shown):
        source(tmp_path)
    (tmp_path / "metadata.jsonl").write_text("nonsense\n" * 12)
    with pytest.raises(DataError, match=r"lines \[1, 2, 3, 4, 5, 6, 7, 8, 9, 10\] are no"):
        source(tmp_path)


def test_an_empty_folder_is_told_which_pictures_are_read(tmp_path):
    with pytest.raises(DataError, match=r"no picture \(\.bmp, \.jpeg, \.jpg, \.png, \.webp\)"):
        source(tmp_path)


def test_grey_pictures_palettes_and_transparency_become_three_channels(tmp_path):
    Image.new("L", (2, 2), 51).save(tmp_path / "a.png")
    Image.new("P", (2, 2), 0).save(tmp_path / "b.png")
    Image.new("RGBA", (2, 2), (51, 102, 153, 0)).save(tmp_path / "c.png")
    for name in "abc":
        (tmp_path / f"{name}.txt").write_text(name)
    grey, palette, clear = [
        prompt.media.pixels for prompt in source(tmp_path, shuffle=False).take(3)
    ]
    assert {pixels.shape for pixels in (grey, palette, clear)} == {(3, 1, 2, 2)}
    assert {pixels.dtype for pixels in (grey, palette, clear)} == {torch.float32}
    assert grey.unique().tolist() == pytest.approx([0.2])
    assert clear[:, 0, 0, 0].tolist() == pytest.approx([0.2, 0.4, 0.6])


def test_shuffling_is_by_epoch_and_seed_and_file_order_is_the_alternative(folder):
    shuffled = [[p.row for p in source(folder).take(10)] for _ in range(2)]
    assert shuffled[0] == shuffled[1]
    assert sorted(shuffled[0][:5]) == sorted(shuffled[0][5:]) == [0, 1, 2, 3, 4]
    assert shuffled[0][:5] != shuffled[0][5:]
    assert [p.row for p in source(folder, shuffle=False).take(7)] == [0, 1, 2, 3, 4, 0, 1]
    assert [p.epoch for p in source(folder).take(7)] == [0] * 5 + [1] * 2

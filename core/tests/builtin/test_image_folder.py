"""The source ``image_folder``: captions, order, resume, and errors that name files."""

from __future__ import annotations

import json
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from PIL import Image

from drl.builtin.config_data import ImageFolderOptions
from drl.builtin.data_image_folder import ImageFolderSource
from drl.errors import DataError
from drl.media.fit import Target, fitted
from drl.media.reading import read_media
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


def section(on_broken_row="refuse"):
    return SimpleNamespace(on_broken_row=on_broken_row)


def source(folder, on_broken_row="refuse", **options):
    context = Context(seed=1, section=section(on_broken_row))
    return ImageFolderSource(ImageFolderOptions(path=folder, **options), context)


def pixels_of(prompt, height=4, width=6):
    return read_media(prompt.media, Target(height=height, width=width)).pixels


class TestImageFolder(DataSourceContract):
    component = ("data_source", "image_folder")
    capabilities = {"buffer": False, "file": False}  # noqa: RUF012

    @pytest.fixture
    def section(self):
        return section()

    @pytest.fixture
    def option_values(self, folder):
        return {"path": folder}


def test_rows_are_pictures_by_name_with_their_captions(folder):
    prompts = source(folder, shuffle=False).take(5)
    assert [p.text for p in prompts] == [f"picture {name}" for name in "abcde"]
    assert pixels_of(prompts[0]).shape == (3, 1, 4, 6)
    assert [round(pixels_of(p).max().item() * 255) for p in prompts] == [0, 50, 100, 150, 200]


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


def test_shuffling_is_by_epoch_and_seed_and_file_order_is_the_alternative(folder):
    shuffled = [[p.row for p in source(folder).take(10)] for _ in range(2)]
    assert shuffled[0] == shuffled[1]
    assert sorted(shuffled[0][:5]) == sorted(shuffled[0][5:]) == [0, 1, 2, 3, 4]
    assert shuffled[0][:5] != shuffled[0][5:]
    assert [p.row for p in source(folder, shuffle=False).take(7)] == [0, 1, 2, 3, 4, 0, 1]
    assert [p.epoch for p in source(folder).take(7)] == [0] * 5 + [1] * 2


def test_pictures_of_folders_below_are_rows_by_their_path_and_hidden_ones_are_not(tmp_path):
    for name in ("b/x.png", "a.png", "b/c/x.png", ".sft_cache/x.png", "b/.thumbs/x.png", ".x.png"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        picture(tmp_path / name, 7)
        (tmp_path / name).with_suffix(".txt").write_text(f"at {name}")
    prompts = source(tmp_path, shuffle=False).take(3)
    assert [prompt.text for prompt in prompts] == ["at a.png", "at b/c/x.png", "at b/x.png"]
    assert [prompt.media.name for prompt in prompts] == ["a.png", "b/c/x.png", "b/x.png"]
    assert source(tmp_path).rows() == 3


def test_a_list_names_pictures_of_its_folder_and_below_and_the_nearest_list_wins(tmp_path):
    (tmp_path / "sub").mkdir()
    for name in ("a.png", "sub/b.png", "sub/c.png"):
        picture(tmp_path / name, 7)
    above = [
        {"file_name": name, "text": f"above {name}"} for name in ("a.png", "sub/b.png", "sub/c.png")
    ]
    (tmp_path / "metadata.jsonl").write_text("".join(json.dumps(row) + "\n" for row in above))
    (tmp_path / "sub" / "metadata.jsonl").write_text('{"file_name": "c.png", "text": "near c"}\n')
    texts = [prompt.text for prompt in source(tmp_path, shuffle=False).take(3)]
    assert texts == ["above a.png", "above sub/b.png", "near c"]


def test_pictures_without_caption_and_broken_lines_can_be_skipped_and_are_told(folder, caplog):
    (folder / "c.txt").unlink()
    (folder / "metadata.jsonl").write_text('nonsense\n\n{"file_name": "c.png"}\n')
    with caplog.at_level("WARNING", logger="drl"):
        skipping = source(folder, "skip", shuffle=False)
    assert [prompt.text[-1] for prompt in skipping.take(5)] == ["a", "b", "d", "e", "a"]
    assert (skipping.rows(), skipping.skipped) == (4, ("c.png",))
    assert "lines [1, 3] are skipped" in caplog.text
    assert "1 pictures have no caption, such as ['c.png']; they are skipped" in caplog.text
    for name in "abde":
        (folder / f"{name}.txt").unlink()
    with pytest.raises(DataError, match="5 pictures have no caption"):
        source(folder, "skip")


def test_a_caption_that_is_not_utf8_is_named(folder):
    (folder / "b.txt").write_bytes(b"caf\xe9")
    with pytest.raises(DataError, match=r"b\.txt: is not UTF-8"):
        source(folder)


def test_pictures_are_not_opened_before_they_are_needed(folder):
    (folder / "b.png").write_text("no picture")
    assert len(source(folder, shuffle=False).take(5)) == 5

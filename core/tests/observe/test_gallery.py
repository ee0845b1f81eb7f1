"""Which pictures the report embeds, how, and what it says of those it cannot."""

from __future__ import annotations

import base64
import io
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image

from drl.observe.gallery import MOST_PAIRS, MOST_SAMPLES, Picture, load_gallery
from drl.observe.pictures import save_samples
from drl.types import Sample

Make = Callable[..., Sample]


def decoded(picture: Picture) -> Image.Image:
    """The embedded picture itself."""
    _, _, data = picture.uri.partition(";base64,")
    return Image.open(io.BytesIO(base64.b64decode(data)))


def save(folder: Path, entries: list[Any], picture: Image.Image | None = None) -> None:
    """Write an index, and one picture that all of its entries may name."""
    folder.mkdir(parents=True)
    (picture or Image.new("RGB", (4, 4))).save(folder / "one.png")
    (folder / "samples.json").write_text(json.dumps(entries))


def entry(row: int, **changed: Any) -> dict[str, Any]:
    return {"file": "one.png", "prompt": f"row {row}", "row": row, "seed": 42} | changed


def test_an_empty_folder_and_none_are_remarks_and_no_gallery(tmp_path: Path) -> None:
    for folder in (tmp_path, tmp_path / "absent"):
        gallery = load_gallery(folder)
        assert (gallery.pairs, gallery.samples, gallery.newest) == ((), (), "")
        assert gallery.remarks == (
            "samples/before/samples.json is absent",
            "samples/after/samples.json is absent",
        )


def test_the_newest_rollout_is_the_highest_number_not_the_last_word(tmp_path: Path) -> None:
    for name in ("step_9", "step_10", "before", "after"):
        save(tmp_path / name, [entry(0)])
    (tmp_path / "step_99").mkdir()  # killed before its index was written
    (tmp_path / "zzz").touch()
    gallery = load_gallery(tmp_path)
    assert gallery.newest == "step_10"
    assert [picture.prompt for picture in gallery.samples] == ["row 0"]


def test_more_pairs_than_fit_are_taken_evenly_over_the_data(tmp_path: Path) -> None:
    count = 4 * MOST_PAIRS
    for name in ("before", "after"):
        save(tmp_path / name, [entry(row) for row in range(count)])
    gallery = load_gallery(tmp_path)
    assert gallery.total == count
    shown = [before.prompt for before, _ in gallery.pairs]
    assert shown == [f"row {row}" for row in range(0, count, 4)]


@pytest.mark.parametrize("count", [MOST_PAIRS - 1, MOST_PAIRS])
def test_as_many_pairs_as_fit_are_all_shown(tmp_path: Path, count: int) -> None:
    for name in ("before", "after"):
        save(tmp_path / name, [entry(row) for row in range(count)])
    assert len(load_gallery(tmp_path).pairs) == count


def test_only_the_first_samples_of_a_rollout_are_shown(tmp_path: Path) -> None:
    save(tmp_path / "step_1", [entry(row) for row in range(MOST_SAMPLES + 5)])
    gallery = load_gallery(tmp_path)
    assert [picture.prompt for picture in gallery.samples] == [
        f"row {row}" for row in range(MOST_SAMPLES)
    ]


def test_an_entry_without_its_partner_makes_no_pair(tmp_path: Path) -> None:
    save(tmp_path / "before", [entry(0), entry(1), entry(2, seed=43), "no entry", 7])
    save(tmp_path / "after", [entry(2), entry(1), None])
    gallery = load_gallery(tmp_path)
    assert gallery.total == 1
    ((before, after),) = gallery.pairs
    assert (before.prompt, after.prompt) == ("row 1", "row 1")
    assert gallery.remarks == ()


@pytest.mark.parametrize("broken", ["before", "after"])
def test_a_pair_with_one_broken_side_is_left_out_and_named(tmp_path: Path, broken: str) -> None:
    for name in ("before", "after"):
        save(tmp_path / name, [entry(0), entry(1, file="two.png" if name == broken else "one.png")])
    gallery = load_gallery(tmp_path)
    assert [before.prompt for before, _ in gallery.pairs] == ["row 0"]
    assert gallery.remarks == (f"samples/{broken}/two.png is absent or no picture",)


def test_pictures_stop_when_the_report_would_grow_too_large(tmp_path: Path) -> None:
    noise = torch.randint(256, (256, 256, 3), generator=torch.Generator().manual_seed(0))
    large = Image.fromarray(noise.to(torch.uint8).numpy())
    for name in ("before", "after", "step_1"):
        save(tmp_path / name, [entry(row) for row in range(40)], large)
    gallery = load_gallery(tmp_path)
    embedded = [picture for pair in gallery.pairs for picture in pair] + [*gallery.samples]
    total = sum(len(picture.uri) for picture in embedded)
    longest = max(len(picture.uri) for picture in embedded)
    assert gallery.total == 40
    assert 900_000 < total <= 900_000 + 2 * longest
    assert gallery.samples == ()  # the comparison comes first


@pytest.mark.parametrize(
    ("size", "kind", "shown"),
    [
        ((48, 16), "png", (144, 48)),
        ((144, 144), "png", (144, 144)),
        ((145, 10), "jpeg", (145, 10)),
        ((512, 256), "jpeg", (256, 128)),
    ],
)
def test_small_pictures_are_embedded_as_they_are_and_large_ones_shrunk(
    tmp_path: Path, size: tuple[int, int], kind: str, shown: tuple[int, int]
) -> None:
    save(tmp_path / "step_1", [entry(0)], Image.new("RGB", size, "#336699"))
    (picture,) = load_gallery(tmp_path).samples
    assert picture.uri.startswith(f"data:image/{kind};base64,")
    assert (picture.width, picture.height) == shown
    assert decoded(picture).size == (size if kind == "png" else shown)


@pytest.mark.parametrize("mode", ["L", "RGB", "RGBA"])
def test_small_pictures_keep_every_pixel(tmp_path: Path, mode: str) -> None:
    levels = bytes(range(192)) if mode != "L" else bytes(range(64))
    channels = len(mode)
    made = Image.frombytes(mode, (8, len(levels) // channels // 8), levels)
    save(tmp_path / "step_1", [entry(0)], made)
    (picture,) = load_gallery(tmp_path).samples
    assert decoded(picture).mode == mode
    assert decoded(picture).tobytes() == made.tobytes()


def test_pictures_with_a_palette_or_transparency_are_converted(tmp_path: Path) -> None:
    save(tmp_path / "step_1", [entry(0)], Image.new("P", (8, 8), 3))
    save(tmp_path / "step_02", [entry(0)], Image.new("RGBA", (300, 300), "#33669980"))
    (picture,) = load_gallery(tmp_path).samples
    assert decoded(picture).mode == "RGB"  # JPEG holds no transparency
    (tmp_path / "step_02" / "samples.json").unlink()
    (picture,) = load_gallery(tmp_path).samples
    assert decoded(picture).mode == "RGB"


@pytest.mark.parametrize(
    ("changed", "seed", "reward"),
    [
        ({"reward": 0.25}, 42, 0.25),
        ({"reward": None}, 42, None),
        ({"reward": "high"}, 42, None),
        ({"reward": float("nan")}, 42, None),
        ({"seed": "42"}, None, None),
        ({"seed": None, "prompt": 7}, None, None),
    ],
)
def test_figures_of_an_entry_that_are_none_are_left_out(
    tmp_path: Path, changed: dict[str, Any], seed: int | None, reward: float | None
) -> None:
    save(tmp_path / "step_1", [entry(0, **changed)])
    (picture,) = load_gallery(tmp_path).samples
    assert (picture.seed, picture.reward) == (seed, reward)
    assert picture.prompt == str(changed.get("prompt", "row 0"))


def test_what_a_run_saves_is_what_the_gallery_shows(tmp_path: Path, make_sample: Make) -> None:
    generator = torch.Generator().manual_seed(0)
    samples = [
        make_sample(
            row,
            f"zażółć 🎨 {row}",
            reward=row / 4,
            pixels=torch.rand(3, 1, 6, 9, generator=generator),
        )
        for row in range(3)
    ]
    save_samples(tmp_path / "before", samples, rows=1)
    save_samples(tmp_path / "after", samples[::-1], rows=1)
    gallery = load_gallery(tmp_path)
    assert [pair[0].prompt for pair in gallery.pairs] == [s.prompt.text for s in samples]
    for before, after in gallery.pairs:
        assert decoded(before).tobytes() == decoded(after).tobytes()
        assert (before.seed, before.reward) == (after.seed, after.reward)

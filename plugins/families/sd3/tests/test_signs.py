"""The prompts for legible text: what ships is what the module makes, and the lists share nothing."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from drl_family_sd3.signs import HELD_OUT, TRAINING, Material, main, prompts, texts

SHIPPED = Path(__file__).resolve().parents[4] / "recipes" / "sd3" / "signs"


def rows(name: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (SHIPPED / f"{name}.jsonl").read_text().splitlines()]


def words(name: str) -> set[str]:
    return {word for row in rows(name) for word in row["metadata"]["target"].split()}


def scenes(name: str) -> set[str]:
    return {row["input"].replace(row["metadata"]["target"], "{}") for row in rows(name)}


def test_the_shipped_lists_are_what_the_module_writes(tmp_path: Path) -> None:
    assert main([str(tmp_path / "made")]) == 0
    for name in ("train", "heldout"):
        made = (tmp_path / "made" / f"{name}.jsonl").read_bytes()
        assert made == (SHIPPED / f"{name}.jsonl").read_bytes()


def test_no_word_and_no_scene_is_in_both() -> None:
    assert not words("train") & words("heldout")
    assert not scenes("train") & scenes("heldout")
    assert (len(rows("train")), len(rows("heldout"))) == (512, 64)


@pytest.mark.parametrize("name", ["train", "heldout"])
def test_each_row_asks_for_a_text_of_its_own_between_quotes(name: str) -> None:
    found = rows(name)
    targets = [row["metadata"]["target"] for row in found]
    assert len(set(targets)) == len(targets)
    for row, target in zip(found, targets, strict=True):
        assert re.findall(r'"([^"]*)"', row["input"]) == [target]
        assert re.fullmatch(r"[A-Za-z]+( [A-Za-z0-9]+){0,2}", target)


def test_all_scenes_come_equally_often() -> None:
    for material, count in ((TRAINING, 48), (HELD_OUT, 16)):
        made = prompts(material, count, seed=1)
        per_scene = [
            sum(scene.split("{}")[0] in str(row["input"]) for row in made)
            for scene in material.scenes
        ]
        assert per_scene == [count // len(material.scenes)] * len(material.scenes)


def test_texts_of_a_small_material_by_hand() -> None:
    small = Material(
        scenes=('A "{}"',),
        objects=("Bread",),
        qualities=("Warm",),
        places=("Tower",),
        endings=("Tour",),
        numbers=range(2, 10, 7),
    )
    assert [*texts(small)] == [
        "Bread",
        "Tower",
        "Warm Bread",
        "Warm Tower",
        "Tower 2",
        "Tower 9",
        "Warm Tower Tour",
    ]
    assert prompts(small, 1, seed=0) == prompts(small, 1, seed=0)


def test_without_a_folder_it_says_how_it_is_called(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 2
    assert capsys.readouterr().err == "python -m drl_family_sd3.signs FOLDER\n"

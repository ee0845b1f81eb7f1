"""Preference files: what a row is, what the source gives, what the logger writes for it."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from PIL import Image

from drl.api import Context, ContractError, DataError, DrlError, Media, MediaFile, RunFacts, Sample
from drl.testing.builders import make_sample
from drl_loss_dpo.config import PreferenceLoggerConfig, PreferencesConfig
from drl_loss_dpo.logger import FILE, FOLDER, PreferenceLogger
from drl_loss_dpo.rows import SHOWN
from drl_loss_dpo.source import PreferenceSource

GOOD = '{"input": "a", "chosen": "x.png", "rejected": "y.png"}'


def source_of(path: Path | None, *, key: str = "input", broken: str = "refuse") -> PreferenceSource:
    section = SimpleNamespace(prompt_data=path, input_key=key, on_broken_row=broken)
    return PreferenceSource(PreferencesConfig(shuffle=False), Context(section=section))


def file_of(folder: Path, *lines: str) -> Path:
    path = folder / "rows.jsonl"
    path.write_text("\n".join(lines), "utf-8")
    return path


def group_of(rewards: Sequence[float | None], *, group: int = 0) -> list[Sample]:
    """Samples of one prompt with these rewards; their pictures are as bright as their member."""
    samples = []
    for member, reward in enumerate(rewards):
        pixels = torch.full((3, 1, 4, 6), member / 10)
        sample = make_sample(f"sign {group}", pixels=pixels, member=member, group_index=group)
        sample.reward = reward
        samples.append(sample)
    return samples


def started(folder: Path, *, first: int = 0, **options: Any) -> PreferenceLogger:
    logger = PreferenceLogger(PreferenceLoggerConfig(**options), Context())
    logger.start(RunFacts(name="x", run_dir=folder, recipe={}, first=first, total=9))
    return logger


def written(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / FOLDER / FILE).read_text("utf-8").splitlines()]


def test_a_row_is_a_prompt_with_two_files_beside_the_rows(
    tmp_path: Path, make_preferences: Callable[[Path, int], Path]
) -> None:
    path = make_preferences(tmp_path, 2)
    first, second, again = source_of(path).take(3)
    assert (first.text, first.row, first.epoch) == ("sign 0", 1, 0)
    assert (second.row, again.row, again.epoch) == (2, 1, 1)
    assert first.media == MediaFile(root=path.parent, name="pictures/0-chosen.png")
    assert first.rejected == MediaFile(root=path.parent, name="pictures/0-rejected.png")


def test_videos_are_told_by_their_ending(tmp_path: Path) -> None:
    row = {"input": "a", "chosen": "x.MP4", "rejected": "y.png"}
    (prompt,) = source_of(file_of(tmp_path, json.dumps(row))).take(1)
    assert isinstance(prompt.media, MediaFile)
    assert isinstance(prompt.rejected, MediaFile)
    assert (prompt.media.kind, prompt.rejected.kind) == ("video", "image")


def test_the_key_of_the_text_is_the_recipes(tmp_path: Path) -> None:
    path = file_of(tmp_path, GOOD.replace("input", "text"))
    assert source_of(path, key="text").take(1)[0].text == "a"
    with pytest.raises(DataError, match="line 1: needs a text under 'input'; it has 'text'"):
        source_of(path)


@pytest.mark.parametrize(
    ("line", "why"),
    [
        ("{", "is not JSON"),
        ("[" * 100_000, "is not JSON"),
        ("3", "must be a JSON object"),
        ("{}", "needs a text under 'input'; it has nothing"),
        ('{"input": " "}', "needs a text under 'input'"),
        ('{"input": "a", "chosen": "x.png"}', "needs a text under 'rejected'"),
        ('{"input": "a", "chosen": 3, "rejected": "y.png"}', "needs a text under 'chosen'"),
        (GOOD.replace("y.png", "x.png"), "chosen and rejected are both 'x.png'"),
        (GOOD.replace("y.png", "y\\u0000.png"), "needs a text under 'rejected'"),
    ],
)
def test_a_broken_row_is_named_with_its_line_or_left_out(
    tmp_path: Path, line: str, why: str
) -> None:
    path = file_of(tmp_path, "", GOOD, line, GOOD)
    with pytest.raises(DataError) as refusal:
        source_of(path)
    assert f"line 3: {why}" in str(refusal.value)
    assert 'data.on_broken_row = "skip"' in str(refusal.value)
    kept = source_of(path, broken="skip")
    assert [prompt.row for prompt in kept.take(2)] == [2, 4]


def test_many_broken_rows_are_counted(tmp_path: Path) -> None:
    with pytest.raises(DataError) as refusal:
        source_of(file_of(tmp_path, GOOD, *["{"] * (SHOWN + 5)))
    text = str(refusal.value)
    assert f"has {SHOWN + 5} broken rows" in text
    assert "… and 5 more" in text
    assert text.count("is not JSON") == SHOWN


@pytest.mark.parametrize(
    ("name", "content", "why"),
    [
        (None, "", "data.prompt_data is not set"),
        ("absent.jsonl", GOOD, "is no .jsonl file"),
        ("rows.csv", GOOD, "is no .jsonl file"),
        ("rows.jsonl", "\n  \n", "holds no preference: it is empty"),
        ("rows.jsonl", "{", "has 1 broken row\n"),
    ],
)
def test_nothing_to_read_is_said(tmp_path: Path, name: str | None, content: str, why: str) -> None:
    if name != "absent.jsonl":
        (tmp_path / (name or "x")).write_text(content)
    with pytest.raises(DataError, match=why):
        source_of(None if name is None else tmp_path / name, broken="skip")


def test_each_epoch_has_an_order_of_its_own_when_shuffled(tmp_path: Path) -> None:
    lines = [GOOD.replace("x.png", f"{n}.png") for n in range(8)]
    section = SimpleNamespace(
        prompt_data=file_of(tmp_path, *lines), input_key="input", on_broken_row="refuse"
    )
    source = PreferenceSource(PreferencesConfig(), Context(section=section))
    first, second = ([prompt.row for prompt in source.take(8)] for _ in range(2))
    assert first != second
    assert sorted(first) == sorted(second) == list(range(1, 9))


def test_other_rows_than_those_of_the_save_are_refused(tmp_path: Path) -> None:
    state = source_of(file_of(tmp_path, GOOD, GOOD)).state()
    other = source_of(file_of(tmp_path, GOOD, GOOD.replace("x.png", "z.png")))
    with pytest.raises(DataError, match="are not those of the saved run"):
        other.restore(state)


def test_the_best_picture_is_chosen_over_the_worst(tmp_path: Path) -> None:
    logger = started(tmp_path)
    logger.samples(4, [*group_of([0.5, 0.0, 1.0], group=7), *group_of([0.2, 0.9], group=8)])
    first, second = written(tmp_path)
    assert (first["input"], first["step"]) == ("sign 7", 4)
    assert (first["chosen_reward"], first["rejected_reward"]) == (1.0, 0.0)
    assert (second["chosen_reward"], second["rejected_reward"]) == (0.9, 0.2)
    with Image.open(tmp_path / FOLDER / first["chosen"]) as picture:
        assert picture.size == (6, 4)
        assert picture.getpixel((0, 0)) == (51, 51, 51)  # member 2: 0.2 of 255
    assert len(list((tmp_path / FOLDER).glob("*.png"))) == 4


def test_groups_that_tie_and_samples_without_reward_give_no_pair(tmp_path: Path) -> None:
    logger = started(tmp_path)
    logger.samples(0, [*group_of([0.5, 0.5, 0.5]), *group_of([None, 0.7, None], group=1)])
    assert written(tmp_path) == []
    unseen = group_of([0.1, 0.9], group=2)
    unseen[1].media = None
    logger.samples(1, unseen)
    assert written(tmp_path) == []


@pytest.mark.parametrize(
    ("options", "gaps"),
    [
        ({}, [1.0]),
        ({"pairs_per_group": 2}, [1.0, 0.5]),
        ({"pairs_per_group": 9}, [1.0, 0.5]),
        ({"pairs_per_group": 2, "min_gap": 0.5}, [1.0]),
        ({"min_gap": 1.0}, []),
    ],
)
def test_the_options_say_how_many_pairs_and_how_far_apart(
    tmp_path: Path, options: dict[str, Any], gaps: list[float]
) -> None:
    started(tmp_path, **options).samples(0, group_of([0.25, 1.0, 0.0, 0.75, 0.5]))
    found = [row["chosen_reward"] - row["rejected_reward"] for row in written(tmp_path)]
    assert found == gaps


def test_a_resumed_run_writes_its_iterations_again(tmp_path: Path) -> None:
    logger = started(tmp_path)
    for step in range(3):
        logger.samples(step, group_of([0.0, 1.0], group=step))
    with (tmp_path / FOLDER / FILE).open("a") as file:
        file.write('{"step": 0, "inp')  # what a kill leaves behind
    again = started(tmp_path, first=1)
    assert [row["step"] for row in written(tmp_path)] == [0]
    again.samples(1, group_of([0.0, 1.0], group=1))
    again.close()
    assert [row["step"] for row in written(tmp_path)] == [0, 1]


def test_what_the_logger_writes_the_source_reads(tmp_path: Path) -> None:
    started(tmp_path, pairs_per_group=2).samples(0, group_of([0.0, 0.2, 0.4, 0.6]))
    prompts = source_of(tmp_path / FOLDER / FILE).take(2)
    for prompt in prompts:
        for file in (prompt.media, prompt.rejected):
            assert isinstance(file, MediaFile)
            assert file.path.is_file()
    assert prompts[0].text == "sign 0"


def test_videos_and_samples_before_the_start_are_refused(tmp_path: Path) -> None:
    logger = PreferenceLogger(PreferenceLoggerConfig(), Context())
    with pytest.raises(DrlError, match="before start"):
        logger.samples(0, group_of([0.0, 1.0]))
    videos = group_of([0.0, 1.0])
    for sample in videos:
        assert sample.media is not None
        sample.media = replace(sample.media, pixels=torch.zeros(3, 5, 4, 4), kind="video")
    assert all(isinstance(sample.media, Media) for sample in videos)
    with pytest.raises(ContractError, match="5 frames"):
        started(tmp_path).samples(0, videos)

"""Options of encoded media that have no use are told, and folders and checkpoints that are not there."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

Problems = Callable[..., dict[str, str]]
Warnings = Callable[..., dict[str, str]]

SUPERVISED = {
    "algorithm.loss": "sft_loss",
    "train.train_only": True,
    "reward.type": None,
    "sde.step_strategy": None,
}


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("data.sft_encoder_checkpoint", "owner/name"),
        ("data.sft_frame_stride", 2),
        ("data.sft_cache", "cache"),
        ("data.sft_workers", 2),
    ],
)
def test_encoding_of_a_run_that_encodes_nothing_is_told(
    warnings: Warnings, key: str, value: Any
) -> None:
    frames = {"sampling.num_frames": 5}
    said = warnings({**frames, key: value})[key]
    assert said == "is not used: without train.train_only no media are encoded"
    assert key not in warnings({**SUPERVISED, **frames, key: value})


def test_a_stride_of_one_frame_is_told(warnings: Warnings) -> None:
    key = "data.sft_frame_stride"
    said = warnings({**SUPERVISED, key: 2})[key]
    assert said == "is not used: sampling.num_frames is 1, one frame"
    assert key not in warnings({**SUPERVISED, key: 1})
    assert "train_only" in warnings({key: 2})[key]


def test_a_cache_is_a_folder_and_may_not_be_there_yet(
    load: Callable[..., Any], problems: Problems, folder: Path
) -> None:
    key = "data.sft_cache"
    assert load({**SUPERVISED, key: "new"}).data.sft_cache == folder / "new"
    (folder / "file").write_text("")
    assert (
        problems({**SUPERVISED, key: "file"})[key] == f"{folder / 'file'} is a file; give a folder"
    )


def test_a_checkpoint_of_encoders_is_placed_like_the_models(
    load: Callable[..., Any], problems: Problems, folder: Path
) -> None:
    (folder / "encoders").mkdir()
    key = "data.sft_encoder_checkpoint"
    for given, placed in (("encoders", str(folder / "encoders")), ("owner/name", "owner/name")):
        assert load({**SUPERVISED, key: given}).data.sft_encoder_checkpoint == placed
    assert (
        f"there is no folder {folder / 'nowhere'}" in problems({**SUPERVISED, key: "nowhere"})[key]
    )


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("data.sft_frame_stride", 0),
        ("data.sft_workers", -1),
        ("data.on_broken_row", "ignore"),
        ("data.sft_encoder_checkpoint", ""),
        ("data.sft_cache", ""),
    ],
)
def test_values_have_limits(problems: Problems, key: str, value: Any) -> None:
    assert list(problems({**SUPERVISED, key: value})) == [key]

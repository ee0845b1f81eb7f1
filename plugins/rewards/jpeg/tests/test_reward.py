"""File sizes by a second way of making the file, and the guide that quotes the source."""

import ast
import asyncio
import io
import re
import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

import drl_reward_jpeg.reward
from drl.api import Context, Media, Prompt, Sample, Score
from drl_reward_jpeg.config import JpegOptions
from drl_reward_jpeg.reward import JpegReward

SOURCE = Path(drl_reward_jpeg.reward.__file__)
MEMBER = Path(__file__).parents[1]
GUIDE = MEMBER.parents[2] / "docs" / "a-reward-in-30-lines.md"


def sample(pixels: torch.Tensor | None, index: int = 0) -> Sample:
    media = None if pixels is None else Media(pixels=pixels)
    prompt = Prompt(row=index, text="anything")
    return Sample(index=index, group_index=0, member=index, prompt=prompt, seed=0, media=media)


def scored(samples: Sequence[Sample], **options: Any) -> Sequence[Score]:
    async def ask() -> Sequence[Score]:
        return await JpegReward(JpegOptions(**options), Context()).score(samples)

    return asyncio.run(ask())


def noise(frames: int = 1, channels: int = 3) -> torch.Tensor:
    return torch.rand(channels, frames, 24, 32, generator=torch.Generator().manual_seed(0))


def kilobytes(pixels: torch.Tensor, quality: int) -> float:
    array = np.rint(pixels[:, 0].permute(1, 2, 0).numpy() * np.float32(255)).astype(np.uint8)
    file = io.BytesIO()
    Image.fromarray(array).save(file, "JPEG", quality=quality)
    return file.tell() / 1024


@pytest.mark.parametrize("quality", [30, 75, 95])
def test_is_minus_the_size_of_the_file(quality: int) -> None:
    (one,) = scored([sample(noise())], quality=quality)
    assert one.value == -kilobytes(noise(), quality)


def test_may_reward_large_files() -> None:
    (one,) = scored([sample(noise())], compress=False)
    assert one.value == kilobytes(noise(), 75)


def test_a_flat_picture_beats_noise() -> None:
    flat, busy = scored([sample(torch.full((3, 1, 24, 32), 0.5)), sample(noise())])
    assert flat.value is not None
    assert busy.value is not None
    assert flat.value > busy.value


def test_better_quality_is_a_larger_file() -> None:
    sizes = [scored([sample(noise())], quality=quality, compress=False)[0] for quality in (20, 90)]
    assert sizes[0].value is not None
    assert sizes[1].value is not None
    assert sizes[0].value < sizes[1].value


def test_one_channel_counts_as_grey() -> None:
    grey = noise(channels=1)
    assert scored([sample(grey)]) == scored([sample(grey.repeat(3, 1, 1, 1))])


def test_a_video_is_one_item_and_its_first_frame() -> None:
    video = noise(frames=3)
    assert scored([sample(video), sample(video)]) == scored([sample(video[:, :1])] * 2)


@pytest.mark.parametrize(
    "pixels",
    [
        None,
        noise() * 2 - 1,
        noise() * 255,
        (noise() * 255).byte(),
        torch.full((3, 1, 4, 4), float("nan")),
        torch.full((3, 1, 4, 4), float("inf")),
    ],
)
def test_no_picture_in_range_is_a_failure(pixels: torch.Tensor | None) -> None:
    (one,) = scored([sample(pixels)])
    assert one.value is None
    assert one.failure


def test_runs_in_the_driver() -> None:
    assert JpegReward(JpegOptions(), Context()).workers().processes == 0


@pytest.mark.parametrize("wrong", [{"quality": 0}, {"quality": 96}, {"qualty": 75}])
def test_options_have_limits(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValueError):
        JpegOptions(**wrong)


def test_the_reward_has_thirty_lines() -> None:
    source = SOURCE.read_text(encoding="utf-8")
    assert len(source.splitlines()) <= 30
    assert ast.parse(source).body


def test_the_guide_quotes_the_plugin() -> None:
    if not GUIDE.exists():
        pytest.skip("the guide is in the workspace only")
    blocks = re.findall(r"```python\n(.*?)```", GUIDE.read_text(encoding="utf-8"), re.DOTALL)
    quoted = [SOURCE.parent / name for name in ("reward.py", "config.py", "plugin.py")]
    quoted.append(Path(__file__).parent / "test_contract.py")
    assert blocks == [path.read_text(encoding="utf-8") for path in quoted]


def test_the_guide_quotes_the_entry_point_and_the_options() -> None:
    if not GUIDE.exists():
        pytest.skip("the guide is in the workspace only")
    blocks = re.findall(r"```toml\n(.*?)```", GUIDE.read_text(encoding="utf-8"), re.DOTALL)
    entry, recipe = map(tomllib.loads, blocks)
    project = tomllib.loads((MEMBER / "pyproject.toml").read_text(encoding="utf-8"))
    assert entry["project"]["entry-points"] == project["project"]["entry-points"]
    assert recipe["reward"]["type"] == "jpeg"
    assert JpegOptions(**recipe["reward"]["jpeg"]).quality == 75


def test_the_readme_shows_options_that_exist() -> None:
    text = (MEMBER / "README.md").read_text(encoding="utf-8")
    (block,) = re.findall(r"```toml\n(.*?)```", text, re.DOTALL)
    JpegOptions(**tomllib.loads(block)["reward"]["jpeg"])
    assert all(f"`{name}`" in text for name in JpegOptions.model_fields)

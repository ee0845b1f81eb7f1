"""Real pictures through the real recogniser, and failures that stay with their sample."""

import asyncio
import re
import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from drl.api import Context, Media, Prompt, RewardError, Sample, Score
from drl_reward_ocr.config import OcrOptions
from drl_reward_ocr.recogniser import Picture, Recogniser, read_by_size
from drl_reward_ocr.reward import OcrReward, render
from drl_reward_ocr.text import Line

WORDS = ("OPEN", "WIND", "GOLD", "ZEBRA")


def reward_with(recogniser: Recogniser, **options: Any) -> OcrReward:
    reward = OcrReward(OcrOptions(**options), Context())
    reward.recogniser = recogniser
    return reward


def sample(text: str, media: Media | None, index: int = 0, **metadata: object) -> Sample:
    prompt = Prompt(row=index, text=text, metadata=metadata)
    return Sample(index=index, group_index=0, member=index, prompt=prompt, seed=index, media=media)


def scored(reward: OcrReward, samples: Sequence[Sample]) -> Sequence[Score]:
    async def ask() -> Sequence[Score]:
        return await reward.score(samples)

    return asyncio.run(ask())


def noise(seed: int, height: int = 16, width: int = 48) -> Media:
    generator = torch.Generator().manual_seed(seed)
    return Media(pixels=torch.rand(3, 1, height, width, generator=generator))


@pytest.mark.parametrize("size", [(48, 16), (96, 32), (192, 64)])
def test_reads_glyph_pictures(recogniser: Recogniser, size: tuple[int, int]) -> None:
    samples = [sample(f'sign "{word}"', render(word, *size)) for word in WORDS]
    assert [one.value for one in scored(reward_with(recogniser), samples)] == [1.0] * len(WORDS)


def test_scores_and_parts_of_a_near_miss(recogniser: Recogniser) -> None:
    (one,) = scored(reward_with(recogniser), [sample('sign "OPAL"', render("OPEN"))])
    assert one == Score(value=0.5, parts={"exact": 0.0, "distance": 2.0})


def test_exact_similarity_gives_all_or_nothing(recogniser: Recogniser) -> None:
    samples = [sample('sign "OPEN"', render("OPEN")), sample('sign "OPEL"', render("OPEN"))]
    scores = scored(reward_with(recogniser, similarity="exact"), samples)
    assert [one.value for one in scores] == [1.0, 0.0]


def test_case_counts_when_asked(recogniser: Recogniser) -> None:
    samples = [sample('sign "open"', render("OPEN"))]
    assert scored(reward_with(recogniser), samples)[0].value == 1.0
    assert scored(reward_with(recogniser, case_sensitive=True), samples)[0].value == 0.0


def test_the_target_of_the_metadata_is_used(recogniser: Recogniser) -> None:
    known = sample('a sign "with \\"quotes\\""', render("OPEN"), target="OPEN")
    assert scored(reward_with(recogniser), [known])[0].value == 1.0


def test_mixed_sizes_score_as_they_do_alone(recogniser: Recogniser) -> None:
    """The recogniser pads a batch to its widest picture; a neighbour must not change a reading."""
    pictures = [
        *(render(word, width, 16) for word, width in zip(WORDS, (48, 64, 48, 96), strict=True)),
        *(noise(seed, 16, width) for seed, width in enumerate((48, 64, 96, 160, 40))),
    ]
    samples = [sample('sign "OPEN"', media, index) for index, media in enumerate(pictures)]
    reward = reward_with(recogniser)
    together = scored(reward, samples)
    assert together == [one for each in samples for one in scored(reward, [each])]
    assert together == list(reversed(scored(reward, samples[::-1])))


def test_more_pictures_than_a_batch_score_as_they_do_alone(recogniser: Recogniser) -> None:
    assert recogniser.options.batch_size == 16
    samples = [sample('sign "OPEN"', noise(seed), seed) for seed in range(17)]
    samples.append(sample('sign "GOLD"', render("GOLD", 48, 16), 17))
    reward = reward_with(recogniser)
    alone = [one for each in samples for one in scored(reward, [each])]
    assert scored(reward, samples) == alone
    assert alone[-1].value == 1.0


def test_two_videos_of_three_frames_are_two_scores(recogniser: Recogniser) -> None:
    first, other = render("OPEN").pixels, render("WIND").pixels
    videos = [torch.cat([first, other, other], dim=1), torch.cat([other, first, first], dim=1)]
    samples = [sample('sign "OPEN"', Media(pixels=video, kind="video")) for video in videos]
    assert [one.value for one in scored(reward_with(recogniser), samples)] == [1.0, 0.0]


def test_a_prompt_without_target_fails_alone(recogniser: Recogniser) -> None:
    samples = [
        sample('sign "OPEN"', render("OPEN")),
        sample("sign", render("OPEN"), 1),
        sample('sign ""', render("OPEN"), 2),
    ]
    good, missing, empty = scored(reward_with(recogniser), samples)
    assert good.value == 1.0
    assert missing.value is None
    assert "prompt row 1" in str(missing.failure)
    assert empty.value is None
    assert "prompt row 2" in str(empty.failure)


@pytest.mark.parametrize(
    "pixels",
    [
        render("OPEN").pixels * 2 - 1,
        (render("OPEN").pixels * 255).byte(),
        render("OPEN").pixels * 255,
        render("OPEN").pixels[:, 0],
    ],
)
def test_another_pixel_range_is_a_failure_not_a_score(
    recogniser: Recogniser, pixels: torch.Tensor
) -> None:
    (one,) = scored(reward_with(recogniser), [sample('sign "OPEN"', Media(pixels=pixels))])
    assert one.value is None
    assert "pixels must" in str(one.failure)


def test_a_grey_picture_scores_as_its_rgb_twin(recogniser: Recogniser) -> None:
    rgb = render("OPEN", 48, 16)
    grey = Media(pixels=rgb.pixels[:1])
    reward = reward_with(recogniser)
    assert scored(reward, [sample('"OPEN"', grey)]) == scored(reward, [sample('"OPEN"', rgb)])


def test_a_failing_picture_leaves_its_batch_alone() -> None:
    asked: list[int] = []

    def read(pictures: Sequence[Picture]) -> list[list[Line]]:
        asked.append(len(pictures))
        if any(picture.max() == 13 for picture in pictures):
            raise RuntimeError("Traceback …\nshape of node 7")
        return [[Line(str(picture.max()), 1.0)] for picture in pictures]

    pictures = [np.full((4, 4, 3), value, np.uint8) for value in (1, 13, 2)]
    assert read_by_size(pictures, read) == [
        [Line("1", 1.0)],
        "the recogniser failed: RuntimeError: shape of node 7",
        [Line("2", 1.0)],
    ]
    assert asked == [3, 1, 1, 1]


def test_pictures_of_one_size_share_a_call() -> None:
    asked: list[tuple[int, int]] = []

    def read(pictures: Sequence[Picture]) -> list[list[Line]]:
        asked.append((len(pictures), pictures[0].shape[1]))
        return [[] for _ in pictures]

    widths = [48, 64, 48, 48, 64]
    read_by_size([np.zeros((16, width, 3), np.uint8) for width in widths], read)
    assert asked == [(3, 48), (2, 64)]


def test_detection_reads_a_large_picture(detecting: Recogniser) -> None:
    """As one line the picture is unreadable: the word is a small part of it."""
    pixels = torch.ones(3, 1, 512, 512)
    pixels[:, :, 300:364, 100:292] = render("OPEN").pixels
    known = sample('a shop with the sign "OPEN"', Media(pixels=pixels))
    blank = sample('"OPEN"', Media(pixels=torch.ones(3, 1, 512, 512)))
    found = scored(reward_with(detecting, detect=True), [blank, known])
    assert [one.value for one in found] == [0.0, 1.0]


def test_detection_reads_several_lines(detecting: Recogniser) -> None:
    pixels = torch.cat([render("OPEN").pixels, render("").pixels, render("WIND").pixels], dim=2)
    known = sample('"OPEN WIND"', Media(pixels=pixels))
    (one,) = scored(reward_with(detecting, detect=True), [known])
    assert one.value == 1.0


def test_start_loads_a_recogniser_that_scores_the_golden_pair() -> None:
    async def life() -> Sequence[Score]:
        reward = OcrReward(OcrOptions(image_width=144, batch_size=4, threads=2), Context())
        await reward.start()
        golden = reward.golden()
        scores = await reward.score([golden.good, golden.bad])
        await reward.close()
        assert reward.recogniser is None
        return scores

    assert [one.value for one in asyncio.run(life())] == [1.0, 0.0]


def test_scoring_before_the_start_is_refused() -> None:
    with pytest.raises(RewardError, match="before start"):
        scored(OcrReward(OcrOptions(), Context()), [])


def test_asks_for_the_processes_of_the_recipe() -> None:
    assert OcrReward(OcrOptions(num_workers=3), Context()).workers().processes == 3


@pytest.mark.parametrize(
    "wrong",
    [
        {"batch_size": 0},
        {"threads": 0},
        {"num_workers": -1},
        {"image_width": 8},
        {"similarity": "cosine"},
        {"batchsize": 4},
    ],
)
def test_options_have_limits(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValueError):
        OcrOptions(**wrong)


def test_the_readme_shows_options_that_exist() -> None:
    text = (Path(__file__).parents[1] / "README.md").read_text(encoding="utf-8")
    (block,) = re.findall(r"```toml\n(.*?)```", text, re.DOTALL)
    OcrOptions(**tomllib.loads(block)["reward"]["ocr"])
    assert all(f"`{name}`" in text for name in OcrOptions.model_fields)


def test_a_wider_input_reads_the_same_word() -> None:
    recogniser = Recogniser(OcrOptions(image_width=320))
    known = sample('sign "WIND"', render("WIND", 48, 16))
    assert scored(reward_with(recogniser), [known])[0].value == 1.0

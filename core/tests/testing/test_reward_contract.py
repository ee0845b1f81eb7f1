"""The reward contract fails on rewards that break it, each for its own reason."""

from collections.abc import Callable, Sequence
from typing import ClassVar

import pytest
import torch

from drl.api import Context, Golden, Media, Reward, Sample, Score
from drl.testing import make_sample
from drl.testing.contracts.reward import RewardContract, numbered, with_prompt

BRIGHT = make_sample("bright", pixels=torch.full((3, 1, 4, 4), 0.9))
DARK = make_sample("bright", pixels=torch.full((3, 1, 4, 4), 0.1))
SAMPLES = numbered([DARK, BRIGHT, BRIGHT, DARK, BRIGHT])


def brightness(sample: Sample) -> Score:
    assert sample.media is not None
    pixels = sample.media.pixels
    if not pixels.is_floating_point() or not 0 <= pixels.min() <= pixels.max() <= 1:
        return Score(value=None, failure="pixels out of range")
    return Score(value=pixels.mean().item())


class Brightness(Reward):
    """An honest reward; the broken ones below change one thing each."""

    media = frozenset({"image", "video"})

    async def score(self, samples: Sequence[Sample]) -> Sequence[Score]:
        return [brightness(sample) for sample in samples]


class Sorted(Brightness):
    async def score(self, samples: Sequence[Sample]) -> Sequence[Score]:
        return sorted(map(brightness, samples), key=lambda one: one.value or 0.0)


class Centred(Brightness):
    """Subtracts the mean of its batch."""

    async def score(self, samples: Sequence[Sample]) -> Sequence[Score]:
        values = [brightness(sample).value or 0.0 for sample in samples]
        mean = sum(values) / len(values) if values else 0.0
        return [Score(value=value - mean) for value in values]


class PerFrame(Brightness):
    """Takes the frames of a video for items."""

    async def score(self, samples: Sequence[Sample]) -> Sequence[Score]:
        return [
            Score(value=float(frame.mean()))
            for sample in samples
            if sample.media is not None
            for frame in sample.media.pixels.unbind(1)
        ]


class Careless(Brightness):
    """Takes any pixels, and lets one NaN spoil the whole batch."""

    async def score(self, samples: Sequence[Sample]) -> Sequence[Score]:
        pixels = [sample.media.pixels.float() for sample in samples if sample.media is not None]
        total = float(torch.stack([each.mean() for each in pixels]).sum()) if pixels else 0.0
        return [Score(value=float(each.mean()) + 0 * total) for each in pixels]


class Writing(Brightness):
    """Normalises the pixels in place."""

    async def score(self, samples: Sequence[Sample]) -> Sequence[Score]:
        scores = [brightness(sample) for sample in samples]
        for sample in samples:
            assert sample.media is not None
            sample.media.pixels.mul_(0.5)
        return scores


class Undecided(Brightness):
    async def score(self, samples: Sequence[Sample]) -> Sequence[Score]:
        return [Score(value=float("nan")) for _ in samples]


class WrongGolden(Brightness):
    def golden(self) -> Golden:
        return Golden(good=DARK, bad=BRIGHT)


class Checks(RewardContract):
    """The contract, called by hand."""

    __test__ = False
    component: ClassVar[tuple[str, str]] = ("reward", "brightness")


def fresh(kind: type[Reward]) -> Reward:
    return kind(None, Context())


def samples() -> list[Sample]:
    copies = numbered(SAMPLES)
    for sample in copies:
        assert sample.media is not None
        sample.media = Media(pixels=sample.media.pixels.clone())
    return copies


Check = Callable[[Checks, Reward], None]
CHECKS: dict[str, Check] = {
    "finite": lambda c, r: c.test_gives_one_finite_score_per_sample(r, samples()),
    "order": lambda c, r: c.test_keeps_the_order(r, samples()),
    "split": lambda c, r: c.test_does_not_depend_on_the_batch_split(r, samples(), 2),
    "empty": lambda c, r: c.test_gives_nothing_for_nothing(r),
    "unchanged": lambda c, r: c.test_leaves_samples_unchanged(r, samples()),
    "good": lambda c, r: c.test_scores_the_good_sample_above_the_bad(r, (BRIGHT, DARK)),
    "bytes": lambda c, r: c.test_refuses_pixels_of_another_range(r, (BRIGHT, DARK), "bytes"),
    "signed": lambda c, r: c.test_refuses_pixels_of_another_range(
        r, (DARK, BRIGHT), "minus_one_to_one"
    ),
    "neighbours": lambda c, r: c.test_a_sample_at_fault_leaves_its_neighbours_alone(
        r, (BRIGHT, DARK)
    ),
    "videos": lambda c, r: c.test_scores_videos_as_items_not_frame_by_frame(r, (BRIGHT, DARK)),
    "one_frame": lambda c, r: c.test_a_one_frame_video_is_its_image(r, (BRIGHT, DARK)),
    "grey": lambda c, r: c.test_takes_pictures_of_one_channel(r, (BRIGHT, DARK)),
    "workers": lambda c, r: c.test_states_where_it_runs(r),
}


@pytest.mark.parametrize("name", sorted(CHECKS))
def test_an_honest_reward_passes(name: str) -> None:
    CHECKS[name](Checks(), fresh(Brightness))


@pytest.mark.parametrize(
    ("broken", "name"),
    [
        (Sorted, "order"),
        (Centred, "split"),
        (PerFrame, "videos"),
        (Careless, "bytes"),
        (Careless, "signed"),
        (Careless, "neighbours"),
        (Writing, "unchanged"),
        (Undecided, "finite"),
    ],
)
def test_a_broken_reward_is_caught(broken: type[Reward], name: str) -> None:
    with pytest.raises(AssertionError):
        CHECKS[name](Checks(), fresh(broken))


def test_a_reward_that_ignores_the_prompt_is_caught() -> None:
    mismatched = with_prompt(BRIGHT, "dark")
    with pytest.raises(AssertionError):
        Checks().test_scores_the_matching_prompt_above_a_wrong_one(
            fresh(Brightness), (BRIGHT, DARK), mismatched
        )


def test_a_golden_pair_in_the_wrong_order_is_caught() -> None:
    with pytest.raises(AssertionError):
        Checks().test_its_golden_pair_scores_in_order(fresh(WrongGolden))

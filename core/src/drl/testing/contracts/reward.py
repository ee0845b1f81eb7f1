"""``RewardContract``: what every reward keeps, whatever it measures."""

from __future__ import annotations

import asyncio
import copy
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch

from drl.interfaces.reward import Reward, Workers
from drl.testing.contracts.base import ContractBase
from drl.types import Media, Prompt, Sample, Score


class RewardContract(ContractBase):
    """Scores are finite, in order, and depend on the sample alone.

    The author overrides ``good_and_bad``: a sample that must score above another. Capabilities:
    ``prompt`` (the score depends on the prompt; then ``mismatched`` is asked too), ``grey``
    (pictures of one channel).
    """

    @pytest.fixture
    def good_and_bad(self, make_sample: Callable[..., Sample]) -> tuple[Sample, Sample]:
        """A sample that scores high and one that scores low."""
        raise NotImplementedError(f"{type(self).__name__} must give the fixture good_and_bad")

    @pytest.fixture
    def mismatched(self, good_and_bad: tuple[Sample, Sample]) -> Sample:
        """The good sample under a prompt that it does not fit."""
        return with_prompt(good_and_bad[0], "something else altogether")

    @pytest.fixture
    def reward(self, instance: Reward) -> Iterator[Reward]:
        """The reward, started; closed after the test."""
        asyncio.run(instance.start())
        yield instance
        asyncio.run(instance.close())

    @pytest.fixture
    def samples(self, good_and_bad: tuple[Sample, Sample]) -> list[Sample]:
        """Five samples in an order that is not that of their scores."""
        good, bad = good_and_bad
        return numbered([bad, good, good, bad, good])

    def test_gives_one_finite_score_per_sample(self, reward: Reward, samples: list[Sample]) -> None:
        scores = score(reward, samples)
        assert len(scores) == len(samples)
        assert all(math.isfinite(value_of(one)) for one in scores)
        assert all(math.isfinite(part) for one in scores for part in one.parts.values())

    def test_keeps_the_order(self, reward: Reward, samples: list[Sample]) -> None:
        forward, backward = score(reward, samples), score(reward, samples[::-1])
        assert forward == backward[::-1]

    @pytest.mark.parametrize("size", [1, 2, 3])
    def test_does_not_depend_on_the_batch_split(
        self, reward: Reward, samples: list[Sample], size: int
    ) -> None:
        parts = [samples[start : start + size] for start in range(0, len(samples), size)]
        assert [one for part in parts for one in score(reward, part)] == score(reward, samples)

    def test_gives_nothing_for_nothing(self, reward: Reward) -> None:
        assert score(reward, []) == []

    def test_leaves_samples_unchanged(self, reward: Reward, samples: list[Sample]) -> None:
        before = copy.deepcopy(samples)
        score(reward, samples)
        for old, new in zip(before, samples, strict=True):
            assert old.media is not None
            assert new.media is not None
            assert torch.equal(old.media.pixels, new.media.pixels)
            assert old.prompt == new.prompt
            assert (new.reward, new.scores, new.removed) == (old.reward, old.scores, old.removed)

    def test_scores_the_good_sample_above_the_bad(
        self, reward: Reward, good_and_bad: tuple[Sample, Sample]
    ) -> None:
        good, bad = score(reward, list(good_and_bad))
        assert value_of(good) > value_of(bad)

    def test_scores_the_matching_prompt_above_a_wrong_one(
        self, reward: Reward, good_and_bad: tuple[Sample, Sample], mismatched: Sample
    ) -> None:
        self.require("prompt")
        match, wrong = score(reward, [good_and_bad[0], mismatched])
        assert value_of(match) > value_of(wrong)

    def test_its_golden_pair_scores_in_order(self, reward: Reward) -> None:
        golden = reward.golden()
        if golden is None:
            pytest.skip("it offers no golden pair")
        good, bad = score(reward, [golden.good, golden.bad])
        assert value_of(good) - value_of(bad) >= max(golden.margin, 1e-12)

    @pytest.mark.parametrize("shift", ["minus_one_to_one", "bytes", "not_a_number"])
    def test_refuses_pixels_of_another_range(
        self, reward: Reward, good_and_bad: tuple[Sample, Sample], shift: str
    ) -> None:
        (one,) = score(reward, [with_pixels(good_and_bad[0], shift)])
        assert one.value is None
        assert one.failure

    def test_a_sample_at_fault_leaves_its_neighbours_alone(
        self, reward: Reward, good_and_bad: tuple[Sample, Sample]
    ) -> None:
        good, bad = good_and_bad
        whole = score(reward, [good, with_pixels(good, "not_a_number"), bad])
        assert [whole[0], whole[2]] == score(reward, [good, bad])

    def test_scores_videos_as_items_not_frame_by_frame(
        self, reward: Reward, good_and_bad: tuple[Sample, Sample]
    ) -> None:
        if "video" not in reward.media:
            pytest.skip("it scores images only")
        assert len(score(reward, [as_video(sample, 3) for sample in good_and_bad])) == 2

    def test_a_one_frame_video_is_its_image(
        self, reward: Reward, good_and_bad: tuple[Sample, Sample]
    ) -> None:
        if "video" not in reward.media:
            pytest.skip("it scores images only")
        good = good_and_bad[0]
        assert score(reward, [as_video(good, 1)]) == score(reward, [good])

    def test_takes_pictures_of_one_channel(
        self, reward: Reward, good_and_bad: tuple[Sample, Sample]
    ) -> None:
        self.require("grey")
        good, bad = score(reward, [with_pixels(sample, "grey") for sample in good_and_bad])
        assert value_of(good) > value_of(bad)

    def test_states_where_it_runs(self, instance: Reward) -> None:
        workers = instance.workers()
        assert isinstance(workers, Workers)
        assert workers.processes >= 0
        assert workers.gpus >= 0

    def test_a_second_close_is_harmless(self, reward: Reward) -> None:
        asyncio.run(reward.close())
        asyncio.run(reward.close())


def score(reward: Reward, samples: Sequence[Sample]) -> list[Score]:
    """Score in a fresh event loop."""
    return list(asyncio.run(_scored(reward, samples)))


async def _scored(reward: Reward, samples: Sequence[Sample]) -> Sequence[Score]:
    return await reward.score(samples)


def value_of(one: Score) -> float:
    """Return the value of a score; the test fails with its reason when there is none."""
    assert one.value is not None, one.failure
    return one.value


def numbered(samples: Sequence[Sample]) -> list[Sample]:
    """Return copies with their own index, as the samples of one rollout have."""
    copies = [copy.copy(sample) for sample in samples]
    for index, sample in enumerate(copies):
        sample.index = index
    return copies


def with_prompt(sample: Sample, text: str) -> Sample:
    """Return a copy under another prompt."""
    other = copy.copy(sample)
    other.prompt = Prompt(row=sample.prompt.row, text=text)
    return other


def with_pixels(sample: Sample, shift: str) -> Sample:
    """Return a copy whose pixels are in another range or layout."""
    assert sample.media is not None
    pixels = sample.media.pixels
    changes: dict[str, Any] = {
        "minus_one_to_one": lambda: pixels * 2 - 1,
        "bytes": lambda: (pixels * 255).round().byte(),
        "not_a_number": lambda: torch.full_like(pixels, math.nan),
        "grey": lambda: pixels.mean(dim=0, keepdim=True),
    }
    other = copy.copy(sample)
    other.media = Media(pixels=changes[shift](), kind=sample.media.kind, fps=sample.media.fps)
    return other


def as_video(sample: Sample, frames: int) -> Sample:
    """Return a copy whose picture is repeated ``frames`` times: pixels ``(C, frames, H, W)``."""
    assert sample.media is not None
    still = sample.media.pixels[:, :1]
    other = copy.copy(sample)
    other.media = Media(pixels=still.repeat(1, frames, 1, 1), kind="video", fps=8.0)
    return other

"""The contracts, on the plugin and on its reward."""

from collections.abc import Callable

import pytest

from drl.testing.contracts.plugin import PluginContract
from drl.testing.contracts.reward import RewardContract, with_prompt
from drl.types import Sample
from drl_reward_ocr.recogniser import Recogniser
from drl_reward_ocr.reward import OcrReward, render


class TestPlugin(PluginContract):
    distribution = "drl-reward-ocr"


class TestOcr(RewardContract):
    component = ("reward", "ocr")

    @pytest.fixture
    def reward(self, instance: OcrReward, recogniser: Recogniser) -> OcrReward:
        instance.recogniser = recogniser
        return instance

    @pytest.fixture
    def good_and_bad(self, make_sample: Callable[..., Sample]) -> tuple[Sample, Sample]:
        return (
            make_sample('sign "OPEN"', pixels=render("OPEN", 48, 16).pixels),
            make_sample('sign "OPEN"', pixels=render("", 48, 16).pixels),
        )

    @pytest.fixture
    def mismatched(self, good_and_bad: tuple[Sample, Sample]) -> Sample:
        return with_prompt(good_and_bad[0], 'sign "WIND"')

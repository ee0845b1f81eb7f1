"""The contracts, on the plugin and on its reward."""

from collections.abc import Callable, Mapping
from typing import ClassVar

import pytest
import torch

from drl.testing.contracts.plugin import PluginContract
from drl.testing.contracts.reward import RewardContract
from drl.types import Sample


class TestPlugin(PluginContract):
    distribution = "drl-reward-jpeg"


class TestJpeg(RewardContract):
    component = ("reward", "jpeg")
    capabilities: ClassVar[Mapping[str, bool]] = {"prompt": False}

    @pytest.fixture
    def good_and_bad(self, make_sample: Callable[..., Sample]) -> tuple[Sample, Sample]:
        flat = torch.full((3, 1, 32, 32), 0.3)
        noise = torch.rand(3, 1, 32, 32, generator=torch.Generator().manual_seed(0))
        return make_sample(pixels=flat), make_sample(pixels=noise)

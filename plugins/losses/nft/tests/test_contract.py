"""The contracts of this distribution."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from drl.testing.contracts.loss import LossContract
from drl.testing.contracts.plugin import PluginContract


class TestPlugin(PluginContract):
    distribution = "drl-loss-nft"


class TestNft(LossContract):
    component = ("loss", "nft")


class TestNftWithEverythingElse(LossContract):
    component = ("loss", "nft")

    @pytest.fixture
    def section(self) -> Any:
        return SimpleNamespace(kl_beta=0.1, adv_clip_max=1.0, ref_mode="lora_base")

    @pytest.fixture
    def option_values(self) -> dict[str, Any]:
        return {
            "beta": 0.1,
            "timestep_fraction": 0.5,
            "adaptive_weight": False,
            "shuffle_timesteps": False,
        }

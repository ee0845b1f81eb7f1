"""The contracts of this distribution."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from drl.testing.contracts.loss import LossContract
from drl.testing.contracts.plugin import PluginContract


class TestPlugin(PluginContract):
    distribution = "drl-loss-flow-grpo"


class TestPolicyLoss(LossContract):
    component = ("loss", "policy_loss")


class TestPolicyLossWithOtherClips(LossContract):
    component = ("loss", "policy_loss")

    @pytest.fixture
    def section(self) -> Any:
        return SimpleNamespace(kl_beta=0.0, adv_clip_max=100.0, ref_mode=None)

    @pytest.fixture
    def option_values(self) -> dict[str, Any]:
        return {"clip_range": 0.2}

"""The contracts of this distribution."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from drl.testing.contracts.loss import LossContract
from drl.testing.contracts.plugin import PluginContract


class TestPlugin(PluginContract):
    distribution = "drl-loss-awm"


class TestAwm(LossContract):
    component = ("loss", "awm")


class TestAwmLogitNormalWithKl(LossContract):
    component = ("loss", "awm")

    @pytest.fixture
    def section(self) -> Any:
        return SimpleNamespace(kl_beta=0.1, adv_clip_max=100.0, ref_mode="lora_base")

    @pytest.fixture
    def option_values(self) -> dict[str, Any]:
        return {"sigma": "logit_normal", "step_share": 1.0}

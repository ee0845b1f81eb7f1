"""The contracts of this distribution."""

from __future__ import annotations

from typing import Any

import pytest

from drl.testing.contracts.loss import LossContract
from drl.testing.contracts.plugin import PluginContract


class TestPlugin(PluginContract):
    distribution = "drl-loss-sft"


class TestSftLoss(LossContract):
    component = ("loss", "sft_loss")


class TestSftLossLogitNormalInBuckets(LossContract):
    component = ("loss", "sft_loss")

    @pytest.fixture
    def option_values(self) -> dict[str, Any]:
        return {"sigma": "logit_normal", "sigma_buckets": 4}

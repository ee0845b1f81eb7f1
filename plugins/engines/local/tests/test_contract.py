"""The contracts of this distribution's plugin and engine."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from drl.api import Launch, Sampling
from drl.testing.contracts.engine import EngineContract
from drl.testing.contracts.plugin import PluginContract


class TestPlugin(PluginContract):
    distribution = "drl-engine-local"


class TestLocal(EngineContract):
    component = ("engine", "local")

    @pytest.fixture
    def option_values(self) -> dict[str, Any]:
        return {"rows": 4}

    @pytest.fixture
    def launch(self, tiny_launch: Launch) -> Launch:
        return tiny_launch


class TestLocalWithCps(TestLocal):
    @pytest.fixture
    def launch(self, cps_launch: Launch) -> Launch:
        return cps_launch

    @pytest.fixture
    def sampling(self) -> Sampling:
        return Sampling(
            num_steps=4,
            height=32,
            width=32,
            guidance_scale=2.0,
            sde_type="cps",
            noise_level=0.7,
            log_prob_no_const=True,
        )


class TestLocalApplied(TestLocal):
    """Adapters are expected, to be computed beside the weights; weights come dense before any does."""

    @pytest.fixture
    def option_values(self) -> dict[str, Any]:
        return {"rows": 4, "adapters": "applied", "weights": "fp32"}

    @pytest.fixture
    def launch(self, tiny_launch: Launch) -> Launch:
        return replace(
            tiny_launch, lora_targets={"transformer": ("transformer_blocks.0.attn.to_q",)}
        )

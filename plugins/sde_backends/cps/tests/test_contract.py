"""The contracts of this distribution."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from drl.testing.contracts.plugin import PluginContract
from drl.testing.contracts.sde_backend import SdeBackendContract


class TestPlugin(PluginContract):
    distribution = "drl-sde-cps"


class TestCps(SdeBackendContract):
    component = ("sde_backend", "cps")

    @pytest.fixture
    def section(self) -> Any:
        return SimpleNamespace(type="cps", noise_level=0.7, log_prob_no_const=True)

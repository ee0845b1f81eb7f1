"""The contracts of this distribution."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from drl.testing.contracts.plugin import PluginContract
from drl.testing.contracts.sde_backend import SdeBackendContract


class TestPlugin(PluginContract):
    distribution = "drl-sde-dance"


class TestDance(SdeBackendContract):
    component = ("sde_backend", "dance")


class TestDanceWithoutConstants(SdeBackendContract):
    component = ("sde_backend", "dance")

    @pytest.fixture
    def section(self) -> Any:
        return SimpleNamespace(type="dance", noise_level=0.7, log_prob_no_const=True)

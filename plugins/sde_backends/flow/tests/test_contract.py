"""The contracts of this distribution."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, ClassVar

import pytest

from drl.testing.contracts.plugin import PluginContract
from drl.testing.contracts.sde_backend import SdeBackendContract


class TestPlugin(PluginContract):
    distribution = "drl-sde-flow"


class TestSde(SdeBackendContract):
    component = ("sde_backend", "sde")


class TestSdeWithoutConstants(SdeBackendContract):
    component = ("sde_backend", "sde")

    @pytest.fixture
    def section(self) -> Any:
        return SimpleNamespace(type="sde", noise_level=0.7, log_prob_no_const=True)


class TestOde(SdeBackendContract):
    component = ("sde_backend", "ode")
    capabilities: ClassVar = {"density": False}

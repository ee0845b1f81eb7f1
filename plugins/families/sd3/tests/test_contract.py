"""The contracts of this distribution's plugin and family."""

from __future__ import annotations

from typing import Any

import pytest

from drl.testing.contracts.data_source import DataSourceContract
from drl.testing.contracts.family import FamilyContract
from drl.testing.contracts.plugin import PluginContract


class TestPlugin(PluginContract):
    distribution = "drl-family-sd3"


class TestSd3(FamilyContract):
    component = ("family", "sd3")

    @pytest.fixture
    def checkpoint(self, tiny: str) -> str:
        return tiny

    @pytest.fixture
    def option_values(self) -> dict[str, Any]:
        return {"decode_rows": 4}


class TestGlyphs(DataSourceContract):
    component = ("data_source", "glyphs")
    capabilities = {"buffer": False, "file": False}  # noqa: RUF012

    @pytest.fixture
    def option_values(self) -> dict[str, Any]:
        return {"count": 5}

"""The contracts of this distribution's plugin and family."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from drl.testing.contracts.family import FamilyContract
from drl.testing.contracts.plugin import PluginContract
from drl_family_sd3.tiny import build_random


class TestPlugin(PluginContract):
    distribution = "drl-family-sd3"


class TestSd3(FamilyContract):
    component = ("family", "sd3")

    @pytest.fixture(scope="class")
    def folder(self, tmp_path_factory: pytest.TempPathFactory) -> Path:
        path = tmp_path_factory.mktemp("sd3")
        build_random(path, seed=0)
        return path

    @pytest.fixture
    def checkpoint(self, folder: Path) -> str:
        return str(folder)

    @pytest.fixture
    def option_values(self) -> dict[str, Any]:
        return {"decode_rows": 4}

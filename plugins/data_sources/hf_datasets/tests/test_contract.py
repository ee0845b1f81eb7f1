"""The contracts of this distribution."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from drl.testing.contracts.data_source import DataSourceContract
from drl.testing.contracts.plugin import PluginContract


class TestPlugin(PluginContract):
    distribution = "drl-data-hf-datasets"


class TestHfDataset(DataSourceContract):
    component = ("data_source", "hf_dataset")
    capabilities = {"buffer": False, "file": False}  # noqa: RUF012

    @pytest.fixture(params=[True, False])
    def option_values(self, tmp_path: Path, request: pytest.FixtureRequest) -> dict[str, Any]:
        import datasets

        rows = {"text": list("abcde"), "image": [f"{n}.png" for n in range(5)]}
        datasets.Dataset.from_dict(rows).save_to_disk(tmp_path / "set")
        return {"path": tmp_path / "set", "image_column": "image", "shuffle": request.param}

    @pytest.fixture
    def section(self) -> Any:
        return SimpleNamespace(on_broken_row="refuse")

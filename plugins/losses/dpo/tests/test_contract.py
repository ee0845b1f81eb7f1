"""The contracts of this distribution."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
import torch

from drl.api import VISUAL, Sample, rejected
from drl.testing.contracts.data_source import DataSourceContract
from drl.testing.contracts.logger import LoggerContract
from drl.testing.contracts.loss import LossContract
from drl.testing.contracts.plugin import PluginContract


class TestPlugin(PluginContract):
    distribution = "drl-loss-dpo"


class TestDpo(LossContract):
    component = ("loss", "dpo")

    @pytest.fixture
    def option_values(self) -> Mapping[str, Any]:
        return {"beta": 3.0}

    @pytest.fixture
    def samples(self, make_sample: Callable[..., Sample]) -> list[Sample]:
        """Four encoded preferences."""
        made = [make_sample(index=10 + i, seed=i) for i in range(4)]
        for sample in made:
            generator = torch.Generator().manual_seed(sample.index)
            sample.clean = {
                name: torch.randn(4, 1, 4, 4, generator=generator)
                for name in (VISUAL, rejected(VISUAL))
            }
        return made


class TestDpoLogitNormal(TestDpo):
    @pytest.fixture
    def option_values(self) -> Mapping[str, Any]:
        return {"beta": 30.0, "sigma": "logit_normal", "flow_shift": 3.0}


class TestPreferences(DataSourceContract):
    component = ("data_source", "preferences")
    capabilities: ClassVar[Mapping[str, bool]] = {"buffer": False}

    @pytest.fixture
    def section(self, tmp_path: Path, make_preferences: Callable[[Path, int], Path]) -> Any:
        return SimpleNamespace(
            prompt_data=make_preferences(tmp_path, 5), input_key="input", on_broken_row="refuse"
        )

    @pytest.fixture
    def empty_section(self, tmp_path: Path) -> Any:
        (tmp_path / "empty.jsonl").write_text("\n")
        return SimpleNamespace(
            prompt_data=tmp_path / "empty.jsonl", input_key="input", on_broken_row="refuse"
        )


class TestPreferencesInFileOrder(TestPreferences):
    @pytest.fixture
    def option_values(self) -> Mapping[str, Any]:
        return {"shuffle": False}


class TestPreferenceLogger(LoggerContract):
    component = ("logger", "preferences")
    capabilities: ClassVar[Mapping[str, bool]] = {"reads_back": False}

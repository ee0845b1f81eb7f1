"""A tiny pipeline with random weights, built once."""

from __future__ import annotations

from pathlib import Path

import pytest

from drl.api import Context
from drl_family_sd3.config import Sd3Options
from drl_family_sd3.family import Sd3Family
from drl_family_sd3.pipeline import Sd3Pipeline
from drl_family_sd3.tiny import build_random


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> str:
    path: Path = tmp_path_factory.mktemp("tiny-sd3")
    build_random(path, seed=0)
    return str(path)


@pytest.fixture(scope="session")
def checkpoint(tiny: str) -> str:
    return tiny


@pytest.fixture(scope="session")
def options() -> Sd3Options:
    return Sd3Options.model_validate({"decode_rows": 4})


@pytest.fixture(scope="session")
def family(options: Sd3Options) -> Sd3Family:
    return Sd3Family(options, Context())


@pytest.fixture(scope="session")
def pipeline(checkpoint: str, options: Sd3Options) -> Sd3Pipeline:
    return Sd3Pipeline(checkpoint, options, Context())

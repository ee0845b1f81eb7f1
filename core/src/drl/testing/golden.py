"""Numbers that other projects' code computed, for tests; absent in a bare checkout, then tests skip."""

from __future__ import annotations

import json
import os
from functools import cache
from pathlib import Path
from typing import Any

import pytest

DEFAULT_FOLDER = Path(__file__).resolve().parents[4].parent / "shared" / "golden"


def golden_folder() -> Path:
    """Return the folder of golden numbers: ``$DRL_GOLDEN``, or ``shared/golden`` beside the checkout."""
    return Path(os.environ.get("DRL_GOLDEN", DEFAULT_FOLDER))


def load_golden(name: str) -> Any:
    """Return the content of ``<name>.json``; skip the running test where the folder is absent."""
    path = golden_folder() / f"{name}.json"
    if not path.is_file():
        pytest.skip(f"no golden numbers at {path}; set DRL_GOLDEN")
    return _parsed(path)


@cache
def _parsed(path: Path) -> Any:
    return json.loads(path.read_text())

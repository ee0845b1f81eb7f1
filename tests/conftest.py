"""Fixtures of the tests that need the whole workspace; makes the scripts of tools/ importable."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from drl.testing.distributions import write_distribution
from drl_cli.main import execute

ROOT = Path(__file__).resolve().parents[1]

sys.path.insert(0, str(ROOT / "tools"))


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder for distributions that this process finds; what it imports is forgotten later."""
    folder = tmp_path / "site"
    folder.mkdir()
    before = set(sys.modules)
    monkeypatch.syspath_prepend(folder)
    yield folder
    for module in set(sys.modules) - before:
        if module.startswith("acme"):
            del sys.modules[module]


@pytest.fixture
def install(site: Path) -> Callable[[str, str], None]:
    """Install a plugin of one module."""

    def write(name: str, source: str) -> None:
        package = name.replace("-", "_")
        write_distribution(site, name, {f"{package}.py": source}, entry_point=package)
        importlib.invalidate_caches()

    return write


@pytest.fixture
def drl(capfd: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, str, str]]:
    """Run one command line in this process; gives exit code, standard output, standard error."""

    def call(*arguments: str) -> tuple[int, str, str]:
        code = execute(arguments)
        out, err = capfd.readouterr()
        return code, out, err

    return call

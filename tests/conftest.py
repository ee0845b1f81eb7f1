"""Fixtures of the tests that need the whole workspace; makes the scripts of tools/ importable."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType

import pytest
from e2e import write_recipe
from killing import Zygote
from third_party_plugins import fresh_recorder, installed

from drl.catalog import Catalog
from drl.testing.distributions import write_distribution
from drl_cli.main import execute
from drl_family_sd3.tiny import build_random

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


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny pipeline with random weights; tests only read it."""
    folder = tmp_path_factory.mktemp("pipeline") / "tiny-sd3"
    build_random(folder, seed=0)
    return folder


@pytest.fixture(scope="session")
def zygote(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Zygote]:
    """Gives runs in processes of their own that need not import anything."""
    with Zygote(tmp_path_factory.mktemp("zygote")) as zygote:
        yield zygote


@pytest.fixture(scope="module")
def lab(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, checkpoint: Path
) -> Iterator[Path]:
    """A folder with the tiny recipe; the plugins of the module's ``STRANGERS`` are installed."""
    folder = tmp_path_factory.mktemp("lab")
    write_recipe(folder, checkpoint)
    with installed(folder / "site", *request.module.STRANGERS):
        yield folder


@pytest.fixture
def recipe(lab: Path) -> Path:
    """The tiny recipe of the module's lab."""
    return lab / "tiny.toml"


@pytest.fixture
def recorder(lab: Path) -> ModuleType:
    """The plugin that writes down every hook of a run, fresh; the module's STRANGERS have it."""
    Catalog.load()
    return fresh_recorder()

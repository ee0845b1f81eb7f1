"""Fixtures of core's tests."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Iterator, Mapping
from importlib.metadata import EntryPoint
from pathlib import Path

import pytest

from drl.components import EMPTY
from drl.testing.distributions import write_distribution


@pytest.fixture
def make_plugin(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Callable[..., EntryPoint]]:
    """Write an importable distribution with this plugin module; what it imports is forgotten later."""
    site = tmp_path / "site"
    site.mkdir()
    before = set(sys.modules)
    monkeypatch.syspath_prepend(site)

    def make(
        name: str,
        source: str,
        *,
        version: str = "1.0",
        entry_point: str | None = None,
        files: Mapping[str, str] = EMPTY,
    ) -> EntryPoint:
        package = name.replace("-", "_")
        modules = {f"{package}/__init__.py": "", f"{package}/plugin.py": source, **files}
        for file in modules:  # another test may have left a module of the same name
            sys.modules.pop(
                file.removesuffix(".py").removesuffix("/__init__").replace("/", "."), None
            )
        point = write_distribution(site, name, modules, version=version, entry_point=entry_point)
        importlib.invalidate_caches()
        return point

    yield make
    for module in set(sys.modules) - before:
        if module.startswith(("acme", "tone")):
            del sys.modules[module]

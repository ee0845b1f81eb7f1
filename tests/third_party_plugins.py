"""Plugins of strangers, installed for a test: real distributions made from the files of third_party/."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType

import pytest

from drl.testing.distributions import write_distribution

SOURCES = Path(__file__).with_name("third_party")


@contextmanager
def installed(site: Path, *names: str) -> Iterator[None]:
    """Install plugins into ``site`` and put it on the path; forget all that they brought afterwards.

    ``acme-recorder`` is the module ``acme_recorder`` of third_party/ and those that begin with its name.
    """
    before = set(sys.modules)
    with pytest.MonkeyPatch.context() as patch:
        for name in names:
            package = name.replace("-", "_")
            files = {path.name: path.read_text() for path in SOURCES.glob(f"{package}*.py")}
            write_distribution(site, name, files, entry_point=package)
        patch.syspath_prepend(site)
        yield
    for module in set(sys.modules) - before:
        if module.startswith("acme"):
            del sys.modules[module]


def fresh_recorder() -> ModuleType:
    """Return the installed recorder, with nothing written down and nothing to answer."""
    recorder = importlib.import_module("acme_recorder")
    recorder.CALLS.clear()
    recorder.REACTIONS.clear()
    return recorder

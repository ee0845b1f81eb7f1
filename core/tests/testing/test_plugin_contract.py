"""The plugin contract finds what is wrong with a whole distribution, before anybody runs it."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Iterator
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import ClassVar

import pytest
from contract_runs import run_classes, subclass

from drl.catalog import Catalog
from drl.testing.contracts.plugin import PluginContract
from drl.testing.distributions import MINIMAL_PLUGIN, write_distribution

REWARD = """
from drl.api import Reward

class Tone(Reward):
    async def score(self, samples):
        return []
"""
OPTIONS = """
from drl.options import Field, Options

class ToneOptions(Options):
    target: float = Field(1.0, ge=0, description='Brightness that scores 1.')
"""
PLUGIN = MINIMAL_PLUGIN.replace("tone.reward:", "tone_parts.reward:").replace(
    "'How bright.'", "'How bright.', config='tone_parts.config:ToneOptions'"
)
FILES = {
    "tone_parts/__init__.py": "",
    "tone_parts/plugin.py": PLUGIN,
    "tone_parts/reward.py": REWARD,
    "tone_parts/config.py": OPTIONS,
}
HEAVY = "test_plugin_and_config_modules_import_nothing_heavy"
SOUND = "test_every_component_is_sound"
LOADS = "test_every_plugin_module_loads"
OWNER = "test_every_name_has_one_owner"
POINT = "test_an_entry_point_names_a_plugin_module"


class Checks(PluginContract):
    __test__ = False
    component: ClassVar[tuple[str, str]] = ("reward", "tone")
    distribution = "tone-reward"


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., EntryPoint]]:
    """Write a distribution that this process and its children find; forget its modules later."""
    site = tmp_path / "site"
    site.mkdir()
    monkeypatch.syspath_prepend(site)
    monkeypatch.setenv("PYTHONPATH", str(site))

    def write(name: str = "tone-reward", **changed: str) -> EntryPoint:
        files = {**FILES, **{f"tone_parts/{file}.py": text for file, text in changed.items()}}
        point = write_distribution(site, name, files, entry_point="tone_parts.plugin")
        importlib.invalidate_caches()
        return point

    yield write
    for module in [name for name in sys.modules if name.startswith("tone_parts")]:
        del sys.modules[module]


def failures(folder: Path, *checks: str, contract: type = Checks) -> dict[str, str]:
    """Run the contract on what is installed now, with a fresh catalog; messages by check."""
    fresh = pytest.fixture(lambda self: Catalog.load())
    classes = {"Test_it": subclass(contract, catalog=fresh)}
    return run_classes(classes, folder, {"it": list(checks)})["it"].failed


def test_a_sound_distribution_passes(install: Callable[..., EntryPoint], tmp_path: Path) -> None:
    install()
    assert failures(tmp_path) == {}


def test_the_name_may_be_written_as_pip_writes_it(
    install: Callable[..., EntryPoint], tmp_path: Path
) -> None:
    install()
    other = type("Checks", (Checks,), {"distribution": "Tone_Reward"})
    assert failures(tmp_path, POINT, SOUND, contract=other) == {}


def test_a_distribution_that_is_not_installed_is_named(tmp_path: Path) -> None:
    assert (
        "tone-reward has no entry point in the group 'drl.plugins'; is it installed?"
        in failures(tmp_path, POINT)[POINT]
    )


@pytest.mark.parametrize(
    ("check", "changed", "said"),
    [
        (LOADS, {"plugin": "import nowhere_at_all"}, "No module named 'nowhere_at_all'"),
        (LOADS, {"plugin": PLUGIN.replace("(1, 0)", "(9, 0)")}, "is for plugin interface 9.0"),
        (HEAVY, {"plugin": "import numpy\n" + PLUGIN}, "import of numpy halted"),
        (HEAVY, {"config": "import torch\n" + OPTIONS}, "'tone_parts.config': "),
        (SOUND, {"plugin": PLUGIN.replace("How bright.", "How bright")}, "full stop"),
        (SOUND, {"plugin": PLUGIN.replace("How bright.", "Is it? It is.")}, "one sentence"),
        (SOUND, {"config": OPTIONS.replace("1.0, ge", "-1.0, ge")}, "the default of option target"),
        (SOUND, {"config": OPTIONS.replace(", description", ", title")}, "has no description"),
        (SOUND, {"reward": "class Tone: pass"}, "must derive from drl.api.Reward"),
        (SOUND, {"reward": REWARD.replace("async def score", "def scor")}, "lacks score"),
        (SOUND, {"config": "class ToneOptions: pass"}, "must derive from drl.options.Options"),
    ],
)
def test_what_is_wrong_is_found_and_named(
    install: Callable[..., EntryPoint],
    tmp_path: Path,
    check: str,
    changed: dict[str, str],
    said: str,
) -> None:
    install(**changed)
    assert said in failures(tmp_path, check)[check]


def test_a_name_that_somebody_else_has_is_found(
    install: Callable[..., EntryPoint], tmp_path: Path
) -> None:
    install(plugin=PLUGIN.replace("'tone'", "'jpeg'"))
    assert "is offered by" in failures(tmp_path, OWNER)[OWNER]


def test_a_name_of_a_core_option_is_found(
    install: Callable[..., EntryPoint], tmp_path: Path
) -> None:
    install(plugin=PLUGIN.replace("'tone'", "'on_failure'"))
    assert "has the name of the core option reward.on_failure" in failures(tmp_path, OWNER)[OWNER]

"""The page on plugins lists every slot as it is called, and its example does what it says."""

from __future__ import annotations

import importlib
import re
from pathlib import Path

import pytest
from conftest import ROOT
from e2e import write_recipe

from drl.catalog import Catalog
from drl.config import load_recipe
from drl.config.signatures import call_text, wanted
from drl.functions import Functions
from drl.kinds import KINDS, SLOTS
from drl.testing import make_prompt, make_sample
from drl.types import Group

PAGE = (ROOT / "docs" / "plugins.md").read_text("utf-8")
SLOT_ROW = re.compile(
    r"^\| `([\w.]+)` \| `(\([^`]+\))`(, async)? \| \S.* \| \S.* \|$", re.MULTILINE
)
PYTHON = re.compile(r"```python\n(def .*?)```", re.DOTALL)
TOML = re.compile(r"```toml\n(\[rollout\]\n.*?)```", re.DOTALL)


def test_every_slot_stands_on_the_page_as_it_is_called() -> None:
    rows = {(option, call, bool(waits)) for option, call, waits in SLOT_ROW.findall(PAGE)}
    assert rows == {(s.option, call_text(s.option), wanted(s.option).asynchronous) for s in SLOTS}


def test_every_kind_stands_on_the_page_with_its_hook() -> None:
    for kind in KINDS:
        assert re.search(rf"^\| `{kind.name}` \| .*`{kind.hook}` \|", PAGE, re.MULTILINE), kind.name


@pytest.mark.parametrize("option", [kind.option for kind in KINDS if kind.option])
def test_every_option_that_takes_a_path_is_named(option: str) -> None:
    assert f"`{option}`" in PAGE.partition("## By path")[2].partition("\n## ")[0]


def test_the_example_is_taken_and_keeps_what_it_says(
    site: Path, tmp_path: Path, checkpoint: Path
) -> None:
    (code,), (recipe,) = PYTHON.findall(PAGE), TOML.findall(PAGE)
    (site / "my_filters.py").write_text(code)
    importlib.invalidate_caches()
    (setting,) = recipe.splitlines()[1:]
    loaded = load_recipe(
        write_recipe(tmp_path, checkpoint),
        sets=[f"rollout.{setting.replace(' = ', '=', 1)}"],
        catalog=Catalog.load(),
    )
    assert "dynamic_sampling_filter" not in {warning.path for warning in loaded.warnings}
    keep = Functions(loaded, loaded.catalog).get("rollout.dynamic_sampling_filter")
    assert keep is not None
    for rewards, kept in (((0.0, 1.0), True), ((0.5, 0.52), False), ((0.5, None), False)):
        samples = [make_sample(member=n, reward=reward) for n, reward in enumerate(rewards)]
        group = Group(group_index=0, prompt=make_prompt(), samples=samples)
        assert keep(None, group) is kept

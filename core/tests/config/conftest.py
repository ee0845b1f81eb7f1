"""A recipe that is right, and ways to load variants of it."""

from __future__ import annotations

import tomllib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import tomli_w

from drl.catalog import Catalog
from drl.config import load_recipe
from drl.config.layers import nested
from drl.config.machine import Machine
from drl.config.recipe import Recipe
from drl.errors import Problem, RecipeError

BASE = """\
[model]
checkpoint = "stabilityai/stable-diffusion-3.5-medium"

[lora]
enabled = true
rank = 32

[train]
num_rollout = 4
num_steps_per_rollout = 2

[rollout]
batch_size = 4
n_samples_per_prompt = 4

[sde]
step_strategy = "sde_window"
num_steps = 2

[data]
prompt_data = "prompts.jsonl"

[reward]
type = "jpeg"
"""

Load = Callable[..., Recipe]


@pytest.fixture(scope="session")
def catalog() -> Catalog:
    """The plugins that are installed here."""
    return Catalog.load()


@pytest.fixture
def base() -> str:
    """Text of a recipe without any problem."""
    return BASE


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with the files that the recipe names."""
    (tmp_path / "prompts.jsonl").write_text('{"input": "a sign"}\n')
    (tmp_path / "heldout.jsonl").write_text('{"input": "a door"}\n')
    for number in range(4):
        (tmp_path / f"recorded-{number}").touch()
    (tmp_path / "empty.jsonl").write_text("\n  \n")
    (tmp_path / "adapter").mkdir()
    (tmp_path / "adapter" / "adapter_config.json").write_text(
        '{"peft_type": "LORA", "r": 32, "lora_alpha": 16, "target_modules": ["to_q"]}'
    )
    return tmp_path


@pytest.fixture
def load(folder: Path, catalog: Catalog) -> Load:
    """Load a text, or the right recipe, with changes by dotted path; None takes an option out."""

    def _load(
        changes: dict[str, Any] | None = None,
        *,
        text: str = BASE,
        sets: Sequence[str] = (),
        override: Path | None = None,
        cuda: bool = False,
        catalog: Catalog = catalog,
    ) -> Recipe:
        file = folder / "recipe.toml"
        file.write_text(changed(text, changes) if changes else text)
        machine = Machine(cuda=cuda)
        return load_recipe(file, sets=sets, override=override, catalog=catalog, machine=machine)

    return _load


@pytest.fixture
def problems(load: Load) -> Callable[..., dict[str, str]]:
    """Load something wrong and return its errors: message by path."""

    def _problems(*args: Any, **kwargs: Any) -> dict[str, str]:
        with pytest.raises(RecipeError) as caught:
            load(*args, **kwargs)
        return by_path(caught.value.problems)

    return _problems


@pytest.fixture
def warnings(load: Load) -> Callable[..., dict[str, str]]:
    """Load something right and return its warnings: message by path."""

    def _warnings(*args: Any, **kwargs: Any) -> dict[str, str]:
        return by_path(load(*args, **kwargs).warnings)

    return _warnings


def by_path(problems: Sequence[Problem]) -> dict[str, str]:
    """Return messages by path; a path that is reported twice fails the test."""
    paths = [problem.path for problem in problems]
    assert len(set(paths)) == len(paths), f"reported twice: {paths}"
    return {problem.path: problem.message for problem in problems}


def changed(text: str, changes: dict[str, Any]) -> str:
    """Return a recipe's text with options replaced by dotted path."""
    tree = tomllib.loads(text)
    for path, value in changes.items():
        *tables, last = path.split(".")
        place = tree
        for table in tables:
            place = place.setdefault(table, {})
        if value is None:
            place.pop(last, None)
        else:
            place[last] = value
    return tomli_w.dumps(tree)


@pytest.fixture
def toml() -> Callable[[dict[str, Any]], str]:
    """Return TOML text of values by dotted path."""
    return lambda flat: tomli_w.dumps(nested(flat.items()))

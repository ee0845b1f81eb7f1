"""Mutated recipes: each resolves, or is refused with a message; never another exception.

What resolves must also come back the same from the TOML that it writes.
"""

from __future__ import annotations

import copy
import random
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tomli_w

from drl.catalog import Catalog
from drl.config import load_recipe
from drl.config.flags import flag_rows, known_keys, moved_keys
from drl.config.machine import Machine
from drl.errors import RecipeError

ROOT = Path(__file__).parents[1]
RECIPES = sorted((ROOT / "recipes").glob("*.toml"))
AVAILABLE = sorted(key for key, row in known_keys().items() if row.available)
STRANGE = [
    *sorted(key for key, row in known_keys().items() if not row.available),
    *sorted(moved_keys()),
    *["model", "algorithm", "foo", "foo.bar", "include", "include.files", "sde.cps.x", "seed"],
    *["reward.jpeg.quality", "logging.console", "algorithm.policy_loss", "sync.in_process.x"],
]
VALUES: list[Any] = [
    *[0, 1, 2, 8, -1, 1.5, -0.0, 1e308, 10**30, True, False, float("nan"), float("inf")],
    *["", "x", "all", "auto", "none", "cps", "ode", "sde", "jpeg", "ocr", "nft", "jsonl", "cpu"],
    *["a,b", "../..", "\0", "é😀", "2GiB", "env:HOME", "1e-4", "true", "2026-01-01", "~nobody/x"],
    *[[], [1, 2], [0, 6], ["a", "a"], ["jsonl"], [[[]]], [{}], [{"name": "x"}]],
    *[{}, {"a": 1}, {"a": {"b": {}}}, [{"name": "ocr"}, {"name": "jpeg", "weight": -1}]],
]
TYPOS = ["[", "]", "=", '"', "'", "#", "\n", "'''", "{", "\\", "\x00", "é", ""]


def place(tree: dict[str, Any], path: str, value: Any) -> None:
    """Set an option by dotted path, over whatever stands in the way."""
    *tables, last = path.split(".")
    for table in tables:
        if not isinstance(tree.get(table), dict):
            tree[table] = {}
        tree = tree[table]
    tree[last] = copy.deepcopy(value)


def paths_in(tree: dict[str, Any], prefix: str = "") -> list[str]:
    """Return the dotted paths of all options of a recipe."""
    found = []
    for key, value in tree.items():
        inner = isinstance(value, dict) and value
        found += paths_in(value, f"{prefix}{key}.") if inner else [f"{prefix}{key}"]
    return found


def remove(tree: dict[str, Any], path: str) -> None:
    *tables, last = path.split(".")
    for table in tables:
        tree = tree[table]
    del tree[last]


def near(value: Any, rng: random.Random) -> Any:
    """Return a value of the same type, so that many mutants are right."""
    if isinstance(value, bool):
        return not value
    if isinstance(value, int):
        return value + rng.choice([-2, -1, 1, 2])
    if isinstance(value, float):
        return value * rng.choice([0.1, 0.5, 2.0, -1.0])
    return value


def mutate(tree: dict[str, Any], rng: random.Random) -> None:
    """Change, add, take out, misspell or move one option."""
    paths = paths_in(tree)
    path = rng.choice(paths)
    kind = rng.choice(["near", "near", "near", "value", "add", "strange", "remove", "misspell"])
    if kind == "near":
        found = tree
        for table in path.split("."):
            found = found[table]
        place(tree, path, near(found, rng))
    elif kind == "value":
        place(tree, path, rng.choice(VALUES))
    elif kind == "add":
        place(tree, rng.choice(AVAILABLE), rng.choice(VALUES))
    elif kind == "strange":
        place(tree, rng.choice(STRANGE), rng.choice(VALUES))
    elif kind == "remove":
        remove(tree, path)
    else:
        letter = rng.randrange(len(path))
        place(tree, (path[:letter] + rng.choice("aeix_") + path[letter + 1 :]).strip("."), 1)


def mutant(text: str, rng: random.Random) -> str:
    """Return the text of a mutated recipe; one in eight has a broken character too."""
    tree = tomllib.loads(text)
    for _ in range(rng.choice([1, 1, 2, 3, 5])):
        mutate(tree, rng)
    written = tomli_w.dumps(tree)
    if rng.random() < 1 / 8:
        at = rng.randrange(len(written))
        written = written[:at] + rng.choice(TYPOS) + written[at + rng.randrange(3) :]
    return written


def extras(rng: random.Random, folder: Path) -> dict[str, Any]:
    """Sometimes add settings and an override file."""
    chosen: dict[str, Any] = {}
    if rng.random() < 1 / 4:
        keys = [*AVAILABLE, *STRANGE]
        chosen["sets"] = [f"{rng.choice(keys)}={rng.choice(VALUES)}" for _ in range(2)]
    if rng.random() < 1 / 8:
        chosen["override"] = folder / "override.yaml"
        key = rng.choice(AVAILABLE).replace(".", ":\n  ")
        chosen["override"].write_text(f"{key}: {rng.choice(VALUES)}\n", "utf-8")
    return chosen


def refused(error: RecipeError) -> bool:
    """Return False; a refusal without a message fails the test."""
    assert error.problems
    assert all(problem.message for problem in error.problems)
    assert str(error)
    return False


@pytest.fixture(scope="module")
def catalog() -> Catalog:
    return Catalog.load()


@pytest.fixture
def survives(tmp_path: Path, catalog: Catalog) -> Callable[[int], bool]:
    """Resolve the mutant of a number: True when it is right, False when it is refused."""
    texts = [recipe.read_text("utf-8") for recipe in RECIPES]
    for source in (ROOT / "recipes").rglob("*.jsonl"):
        target = tmp_path / source.relative_to(ROOT / "recipes")
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text('{"input": "a"}\n')

    def _survives(number: int) -> bool:
        rng = random.Random(number)
        file = tmp_path / "recipe.toml"
        file.write_text(mutant(rng.choice(texts), rng), "utf-8")
        machine = Machine(cuda=rng.random() < 0.5)
        try:
            recipe = load_recipe(file, catalog=catalog, machine=machine, **extras(rng, tmp_path))
        except RecipeError as error:
            return refused(error)
        file.write_text(recipe.to_toml(), "utf-8")
        again = load_recipe(file, catalog=catalog, machine=Machine())
        assert again.resolved() == recipe.resolved()
        return True

    return _survives


def run(survives: Callable[[int], bool], numbers: range) -> None:
    """Resolve many mutants; some must be right and most wrong, or the mutations test nothing."""
    right = 0
    for number in numbers:
        try:
            right += survives(number)
        except Exception as error:
            error.add_note(f"mutant {number}")
            raise
    assert 0.03 < right / len(numbers) < 0.6


def test_500_mutated_recipes_resolve_or_are_refused(survives: Callable[[int], bool]) -> None:
    assert len(flag_rows()) == 204
    run(survives, range(500))


@pytest.mark.slow
def test_2000_more_mutated_recipes_resolve_or_are_refused(
    survives: Callable[[int], bool],
) -> None:
    run(survives, range(500, 2500))

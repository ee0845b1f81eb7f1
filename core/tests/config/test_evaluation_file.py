"""``eval.config``: held-out sets from a file of their own, in the place of ``eval.datasets``."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from drl.config.recipe import Recipe
from drl.errors import RecipeError

Load = Callable[..., Recipe]
Problems = Callable[..., dict[str, str]]

LISTED = """
eval:
  defaults:
    n_samples_per_eval_prompt: 4
    input_key: text
  datasets:
    - name: words
      path: sets/words.jsonl
    - name: signs
      path: sets/signs.jsonl
      n_samples_per_eval_prompt: 2
      rm_type: jpeg
      metadata_key: extra
      metadata_overrides: {level: 3, on: off}
"""

NAMED = {
    "eval": {
        "datasets": {"words": "sets/words.jsonl", "signs": {"path": "sets/signs.jsonl"}},
    }
}


@pytest.fixture
def sets(folder: Path) -> Path:
    """A folder with two sets beside the file that names them, away from the recipe."""
    place = folder / "heldout"
    (place / "sets").mkdir(parents=True)
    for name in ("words", "signs"):
        (place / "sets" / f"{name}.jsonl").write_text('{"text": "a door"}\n')
    return place


def test_sets_come_from_a_list_with_defaults(load: Load, sets: Path) -> None:
    (sets / "eval.yaml").write_text(LISTED)
    words, signs = load({"eval.config": "heldout/eval.yaml"}).eval.datasets
    assert (words.name, words.path) == ("words", sets / "sets" / "words.jsonl")
    assert (words.n_samples_per_prompt, words.input_key, words.rm_type) == (4, "text", None)
    assert (signs.n_samples_per_prompt, signs.input_key, signs.rm_type) == (2, "text", "jpeg")
    assert signs.metadata_key == "extra"
    assert signs.metadata_overrides == {"level": 3, "on": "off"}


def test_sets_come_by_name_from_json(load: Load, sets: Path) -> None:
    (sets / "eval.json").write_text(json.dumps(NAMED))
    found = load({"eval.config": "heldout/eval.json"}).eval.datasets
    assert [(one.name, one.path.name) for one in found] == [
        ("words", "words.jsonl"),
        ("signs", "signs.jsonl"),
    ]


def test_the_resolved_recipe_holds_the_sets_and_means_the_same_without_the_file(
    load: Load, sets: Path
) -> None:
    (sets / "eval.yaml").write_text(LISTED)
    recipe = load({"eval.config": "heldout/eval.yaml"})
    assert recipe.origins["eval.datasets"] == "eval.yaml"
    (sets / "eval.yaml").unlink()
    again = load(text=recipe.to_toml())
    assert again.eval.datasets == recipe.eval.datasets
    assert again.eval.config is None


def test_the_file_wins_over_sets_of_the_recipe_and_says_so(load: Load, sets: Path) -> None:
    (sets / "eval.json").write_text(json.dumps(NAMED))
    pairs = [{"name": "old", "path": "heldout.jsonl"}]
    recipe = load({"eval.datasets": pairs, "eval.config": "heldout/eval.json"})
    assert [one.name for one in recipe.eval.datasets] == ["words", "signs"]
    (warning,) = recipe.warnings
    assert (warning.path, warning.message) == (
        "eval.datasets",
        "are not used: eval.config eval.json wins",
    )


def test_a_file_may_be_named_on_the_command_line(
    load: Load, sets: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (sets / "eval.json").write_text(json.dumps(NAMED))
    monkeypatch.chdir(sets)
    assert len(load(sets=["eval.config=eval.json"]).eval.datasets) == 2


@pytest.mark.parametrize(
    ("content", "path", "said"),
    [
        ({"datasets": []}, "eval.config", "must hold one table, 'eval'"),
        ({"eval": {"datasets": []}}, "eval.config", "eval.datasets must be a list of sets"),
        ({"eval": {"datasets": 3}}, "eval.config", "eval.datasets must be a list of sets"),
        (
            {"eval": {"datasets": NAMED["eval"]["datasets"], "default": {}}},
            "eval.config",
            "eval.default is unknown; did you mean 'defaults'?",
        ),
        (
            {"eval": {"datasets": NAMED["eval"]["datasets"], "defaults": 3}},
            "eval.config",
            "eval.defaults must be a table, got 3",
        ),
        (
            {"eval": {"datasets": [{"name": "a", "path": "gone.jsonl"}]}},
            "eval.datasets[0].path",
            "there is no file",
        ),
        (
            {"eval": {"datasets": [{"name": "a", "pth": "sets/words.jsonl"}]}},
            "eval.datasets[0].pth",
            "unknown option; did you mean 'path'?",
        ),
        (
            {"eval": {"datasets": {"a": {"path": "sets/words.jsonl", "n_samples_per_prompt": 0}}}},
            "eval.datasets[0].n_samples_per_prompt",
            "must be above 0",
        ),
        ({"eval": {"datasets": ["words"]}}, "eval.datasets[0]", "must be a table"),
        (
            {
                "eval": {
                    "datasets": {"a": "sets/words.jsonl"},
                    "defaults": {"metadata_overrides": {"level": [{"deep": None}]}},
                }
            },
            "eval.datasets[0].metadata_overrides",
            "must not hold null",
        ),
    ],
)
def test_mistakes_in_the_file_are_named(
    problems: Problems, sets: Path, content: Any, path: str, said: str
) -> None:
    (sets / "eval.json").write_text(json.dumps(content))
    found = problems({"eval.config": "heldout/eval.json"})
    assert path in found
    assert said in found[path]
    assert "eval.json" in found[path]


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("gone.yaml", "there is no file"),
        ("eval.txt", "must end in .yaml, .yml, .json"),
        ("", "must name a file"),
        (3, "must be a path"),
    ],
)
def test_a_file_that_is_none_is_refused(problems: Problems, name: Any, said: str) -> None:
    found = problems({"eval.config": name})
    assert list(found) == ["eval.config"]
    assert said in found["eval.config"]


def test_a_file_that_cannot_be_parsed_is_named(load: Load, sets: Path) -> None:
    (sets / "eval.yaml").write_text("eval: [")
    with pytest.raises(RecipeError, match=r"(?s)eval.yaml.*is not valid YAML"):
        load({"eval.config": "heldout/eval.yaml"})

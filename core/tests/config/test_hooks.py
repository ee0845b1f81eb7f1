"""What plugins add to a recipe: defaults below the file, problems, claims of checkpoints."""

from __future__ import annotations

import json
from collections.abc import Callable
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

import pytest

from drl.catalog import Catalog
from drl.config import Recipe
from drl.plugins import GROUP
from drl.testing.distributions import write_distribution

Load = Callable[..., Recipe]
Problems = Callable[..., dict[str, str]]
Plugin = Callable[..., Catalog]

HEAD = """
from drl.api import Claim, Component, Problem, hookimpl

DRL_API = (1, 0)

@hookimpl
def drl_register_rewards():
    return [Component("{reward}", "nowhere:Nothing", summary="Never imported.")]

@hookimpl
"""


@pytest.fixture
def plugin(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Plugin:
    """Return a catalog with these hooks installed too, one distribution per text."""

    def _plugin(*hooks: str) -> Catalog:
        points = list(entry_points(group=GROUP))
        for number, text in enumerate(hooks):
            name = f"hooked_{tmp_path.name}_{number}".replace("-", "_").lower()
            head = HEAD.replace("{reward}", f"tone{number}")
            files = {f"{name}/__init__.py": "", f"{name}/plugin.py": head + text}
            site = tmp_path / name
            points.append(
                write_distribution(site, f"acme-{number}", files, entry_point=f"{name}.plugin")
            )
            monkeypatch.syspath_prepend(str(site))
        catalog = Catalog.load(installed=points)
        assert not [f for f in catalog.failures if f.distribution.startswith("acme")]
        return catalog

    return _plugin


def test_a_plugin_suggests_values_below_the_recipe(load: Load, plugin: Plugin) -> None:
    catalog = plugin(
        "def drl_default_options(recipe):\n"
        "    return {'sampling.num_steps': recipe.sampling.num_steps + 2, 'train.seed': 9}\n"
    )
    recipe = load({"reward.type": "tone0"}, sets=["train.seed=3"], catalog=catalog)
    assert recipe.sampling.num_steps == 12
    assert recipe.origins["sampling.num_steps"] == "plugin acme-0"
    assert (recipe.train.seed, recipe.origins["train.seed"]) == (3, "--set")
    assert recipe.eval.num_steps == 12


def test_only_plugins_of_chosen_components_suggest_values(load: Load, plugin: Plugin) -> None:
    catalog = plugin("def drl_default_options():\n    return {'train.seed': 9}\n")
    assert load(catalog=catalog).train.seed == 1234


def test_two_plugins_that_disagree_are_an_error(
    load: Load, problems: Problems, plugin: Plugin
) -> None:
    hook = "def drl_default_options():\n    return {'train.seed': %d}\n"
    catalog = plugin(hook % 1, hook % 2)
    changes = {"reward.type": None, "reward.terms": [{"name": "tone0"}, {"name": "tone1"}]}
    message = problems(changes, catalog=catalog)["train.seed"]
    assert message.startswith("acme-0 and acme-1 suggest different values")
    assert load(changes, sets=["train.seed=5"], catalog=catalog).train.seed == 5


def test_a_suggestion_is_checked_like_any_value(problems: Problems, plugin: Plugin) -> None:
    catalog = plugin("def drl_default_options():\n    return {'train.sed': 9}\n")
    assert problems({"reward.type": "tone0"}, catalog=catalog) == {
        "train.sed": "unknown option; did you mean 'seed'?   (plugin acme-0)"
    }


def test_a_plugin_finds_errors_and_warnings(load: Load, problems: Problems, plugin: Plugin) -> None:
    catalog = plugin(
        "def drl_check_recipe(recipe):\n"
        "    if recipe.train.seed == 13:\n"
        "        yield Problem('train.seed', 'is unlucky')\n"
        "    yield Problem('train.seed', 'is a number', 'warning')\n"
    )
    assert problems(sets=["train.seed=13"], catalog=catalog) == {
        "train.seed": "is unlucky   (--set)"
    }
    assert [w.message for w in load(catalog=catalog).warnings] == ["is a number"]


def test_a_plugin_that_reads_a_wrong_value_is_not_asked(problems: Problems, plugin: Plugin) -> None:
    catalog = plugin(
        "def drl_check_recipe(recipe):\n"
        "    if recipe.train.seed == 1234:\n"
        "        yield Problem('train.seed', 'is the default')\n",
        "def drl_check_recipe(recipe):\n"
        "    options = recipe.options('loss', 'policy_loss')\n"
        "    yield Problem('trust.parity', f'clip {options.clip_range}')\n",
        "def drl_check_recipe(recipe):\n    yield Problem('trust.settings', 'is wrong')\n",
    )
    changes = {"train.seed": "x", "algorithm.policy_loss.clip_range": 0}
    assert problems(changes, catalog=catalog) == {
        "train.seed": "must be a whole number, got 'x'",
        "algorithm.policy_loss.clip_range": "must be above 0, got 0",
        "trust.settings": "is wrong",
    }


def test_a_hook_that_fails_names_its_plugin(load: Load, plugin: Plugin) -> None:
    catalog = plugin("def drl_check_recipe(recipe):\n    return [1 / 0]\n")
    with pytest.raises(ZeroDivisionError) as caught:
        load(catalog=catalog)
    assert caught.value.__notes__ == ["raised by acme-0 in the hook drl_check_recipe"]


def test_a_name_pattern_claims_a_hub_id(load: Load) -> None:
    recipe = load()
    assert recipe.model.family == "sd3"
    assert recipe.origins["model.family"] == "auto"


def test_a_family_that_is_given_is_not_asked_for(load: Load, problems: Problems) -> None:
    assert load({"model.family": "sd3", "model.checkpoint": "acme/model"}).model.family == "sd3"
    message = problems({"model.family": "sd4"})["model.family"]
    assert message.splitlines()[:2] == ["no family named 'sd4' is installed", "did you mean 'sd3'?"]


def test_a_checkpoint_that_nobody_claims_asks_for_the_family(problems: Problems) -> None:
    found = problems({"model.checkpoint": "acme/model"})
    assert found == {
        "model.family": "no installed family claims 'acme/model'; set model.family\ninstalled: sd3"
    }


def pipeline(folder: Path, index: Any) -> str:
    """Write a pipeline folder and return its name."""
    (folder / "mine").mkdir()
    (folder / "mine" / "model_index.json").write_text(
        index if isinstance(index, str) else json.dumps(index)
    )
    return "mine"


def test_a_class_in_model_index_claims_a_folder(load: Load, folder: Path) -> None:
    name = pipeline(folder, {"_class_name": "StableDiffusion3Pipeline"})
    recipe = load({"model.checkpoint": name})
    assert recipe.model.family == "sd3"
    assert recipe.model.checkpoint == str(folder / "mine")


@pytest.mark.parametrize("index", ["{", "[" * 100_000, "\ufffe"])
def test_a_damaged_model_index_is_named(problems: Problems, folder: Path, index: str) -> None:
    name = pipeline(folder, index)
    assert (
        "model_index.json cannot be read"
        in problems({"model.checkpoint": name})["model.checkpoint"]
    )


CLAIM = "def drl_claim_checkpoint(checkpoint):\n    return Claim(family=%r, by=%r, pattern=%r)\n"


def test_a_class_beats_a_name_and_a_longer_pattern_a_shorter_one(
    problems: Problems, folder: Path, plugin: Plugin
) -> None:
    # sd3 claims by the name pattern "stable-diffusion-3" (18 letters)
    longer = plugin(CLAIM % ("other", "name", "stable-diffusion-3.5"))
    assert "no family named 'other'" in problems(catalog=longer)["model.family"]


def test_a_shorter_pattern_does_not_win(load: Load, plugin: Plugin) -> None:
    assert load(catalog=plugin(CLAIM % ("other", "name", "stable"))).model.family == "sd3"


def test_a_tie_names_both_families(problems: Problems, plugin: Plugin) -> None:
    catalog = plugin(CLAIM % ("other", "name", "x" * len("stable-diffusion-3")))
    message = problems(catalog=catalog)["model.family"]
    assert message.startswith("'other' and 'sd3' both claim")

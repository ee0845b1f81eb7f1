"""``grpo_guard`` in a run, and the recipes that are refused with the reason."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
from e2e import RECIPE, metric_rows, run_here, write_recipe

from drl.catalog import Catalog
from drl.config import load_recipe
from drl.errors import RecipeError
from drl_family_sd3.tiny import build_random

OPTIONS = '[algorithm]\nloss = "grpo_guard"\n\n[algorithm.grpo_guard]\nclip_range = 1e-3'
TEXT = RECIPE.replace('"cps"', '"sde"').replace(
    "[algorithm.policy_loss]\nclip_range = 1e-2", OPTIONS
)


@pytest.fixture(scope="module")
def recipe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny recipe with this loss."""
    folder = tmp_path_factory.mktemp("guard")
    build_random(folder / "tiny-sd3", seed=0)
    return write_recipe(folder, folder / "tiny-sd3", TEXT)


def test_a_run_has_parity_and_in_its_second_update_ratios_around_one(
    recipe: Path, tmp_path: Path
) -> None:
    run_here(recipe, tmp_path / "run", "train.num_steps_per_rollout=2")
    before, *rows = metric_rows(tmp_path / "run")
    assert len(rows) == 2
    assert all(math.isfinite(value) for row in [before, *rows] for value in row.values())
    assert rows[0]["trust/parity_worst"] == 0.0
    assert rows[0]["train/ratio_abs_minus_1_update_0"] == 0.0
    for row in rows:
        assert row["train/ratio_abs_minus_1_update_0"] < 1e-6
        assert 0 < row["train/ratio_abs_minus_1_update_1"] < 0.01
        assert row["train/grad_norm"] > 0


def test_a_run_with_a_kl_term(recipe: Path, tmp_path: Path) -> None:
    run_here(recipe, tmp_path / "run", "algorithm.kl_beta=0.04", "train.num_rollout=2")
    first, second = metric_rows(tmp_path / "run")[1:]
    assert first["train/kl_loss"] == 0.0
    assert second["train/kl_loss"] > 0.0


def problems(recipe: Path, *sets: str) -> str:
    with pytest.raises(RecipeError) as refusal:
        load_recipe(recipe, sets=sets, catalog=Catalog.load())
    return str(refusal.value)


def test_the_recipe_is_accepted_as_it_stands(recipe: Path) -> None:
    assert load_recipe(recipe, catalog=Catalog.load()).algorithm.loss == "grpo_guard"


@pytest.mark.parametrize(
    ("sets", "path", "reason"),
    [
        (["sde.type=cps"], "sde.type", "Gaussian steps"),
        (["sde.type=ode"], "sde.type", "density"),
        (["sde.log_prob_no_const=true"], "sde.log_prob_no_const", "needs their constants"),
        (["ema.enabled=true"], "ema.rollout_policy", "must be what made the samples"),
        (["train.train_only=true"], "train.train_only", "trains on rollouts"),
        (["sde.noise_level=0"], "sde.noise_level", "no density"),
    ],
)
def test_what_makes_no_sense_is_refused_with_the_reason(
    recipe: Path, sets: list[str], path: str, reason: str
) -> None:
    text = problems(recipe, *sets)
    assert path in text
    assert reason in text


def test_an_average_that_made_the_rollout_is_accepted(recipe: Path) -> None:
    sets = ["ema.enabled=true", "ema.rollout_policy=ema"]
    assert load_recipe(recipe, sets=sets, catalog=Catalog.load()).ema.enabled

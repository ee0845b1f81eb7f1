"""``awm`` in a run, and the recipes that are refused with the reason."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
from e2e import RECIPE, metric_rows, run_here, write_recipe

from drl.catalog import Catalog
from drl.config import load_recipe
from drl.errors import RecipeError
from drl.stages.pairs import batch_plan
from drl_family_sd3.tiny import build_random

STEPS = """
[sde]
type = "cps"
step_strategy = "sde_window"
num_steps = 2

[sde.sde_window]
range = [0, 3]
"""
TEXT = RECIPE.replace(STEPS, "").replace(
    "[algorithm.policy_loss]\nclip_range = 1e-2", '[algorithm]\nloss = "awm"'
)


@pytest.fixture(scope="module")
def recipe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny recipe with this loss and no stochastic step."""
    folder = tmp_path_factory.mktemp("awm")
    build_random(folder / "tiny-sd3", seed=0)
    return write_recipe(folder, folder / "tiny-sd3", TEXT)


@pytest.mark.parametrize(
    "sets",
    [
        [],
        ["sde.type=ode", "algorithm.kl_beta=0.1", "algorithm.awm.sigma=logit_normal"],
        ["sde.step_strategy=all", "sde.type=sde"],
        ["sde.step_strategy=ode_and_return_last", "train.num_steps_per_rollout=2"],
    ],
)
def test_a_run_trains_and_its_figures_are_finite(
    recipe: Path, tmp_path: Path, sets: list[str]
) -> None:
    run_here(recipe, tmp_path / "run", *sets)
    before, *rows = metric_rows(tmp_path / "run")
    assert len(rows) == 2
    assert all(math.isfinite(value) for row in [before, *rows] for value in row.values())
    for row in rows:
        assert row["train/grad_norm"] > 0
        assert row["train/matching_loss"] > 0
        assert not any(name.startswith("trust/") for name in row)
    if "algorithm.kl_beta=0.1" in sets:
        assert rows[0]["train/kl_loss"] == 0.0 < rows[1]["train/kl_loss"]


def test_the_plan_counts_noise_levels(recipe: Path) -> None:
    loaded = load_recipe(recipe, sets=["algorithm.awm.step_share=0.75"], catalog=Catalog.load())
    plan = batch_plan(loaded)
    assert (plan.pairs_per_sample, plan.pairs_per_step, plan.micro_batches) == (3, 24, 6)


@pytest.mark.parametrize(
    ("sets", "path", "reason"),
    [
        (["sde.num_steps=2"], "sde.num_steps", "trains on the final ones"),
        (
            ["sde.num_steps=1", "sde.step_strategy=sde_window"],
            "sde.step_strategy",
            "use 'ode_and_return_last'",
        ),
        (["sde.step_strategy=all", "sde.type=ode"], "sde.step_strategy", "no stochastic step"),
        (["sampling.guidance_scale=4.5"], "sampling.guidance_scale", "another distribution"),
        (["sampling.true_cfg_scale=2.0"], "sampling.guidance_scale", "set it to 1"),
        (["rollout.shared_start=true"], "rollout.shared_start", "one picture many times"),
        (["train.train_only=true"], "train.train_only", "trains on rollouts"),
    ],
)
def test_what_makes_no_sense_is_refused_with_the_reason(
    recipe: Path, sets: list[str], path: str, reason: str
) -> None:
    with pytest.raises(RecipeError) as refusal:
        load_recipe(recipe, sets=sets, catalog=Catalog.load())
    assert path in str(refusal.value)
    assert reason in str(refusal.value)


def test_a_shared_start_is_accepted_where_the_steps_differ(recipe: Path) -> None:
    sets = ["rollout.shared_start=true", "sde.step_strategy=all", "sde.type=sde"]
    assert load_recipe(recipe, sets=sets, catalog=Catalog.load()).rollout.shared_start


def test_several_updates_of_one_rollout_are_warned_of(recipe: Path) -> None:
    loaded = load_recipe(recipe, sets=["train.num_steps_per_rollout=2"], catalog=Catalog.load())
    texts = [problem.message for problem in loaded.warnings]
    assert any("samples of earlier weights" in text for text in texts)

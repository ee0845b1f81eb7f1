"""``dance`` in a recipe and in a whole run on a tiny pipeline."""

from __future__ import annotations

import importlib
import json
from pathlib import Path

import pytest
from e2e import RECIPE, metric_rows, run_here, summary_of, write_recipe

from drl.catalog import Catalog
from drl.config import load_recipe
from drl.errors import RecipeError
from drl.testing.distributions import write_distribution
from drl_family_sd3.tiny import build_random

TEXT = RECIPE.replace('type = "cps"', 'type = "dance"')

LOSS_ON_CLEAN_LATENTS = """
from drl.api import Component, hookimpl

DRL_API = (1, 0)


@hookimpl
def drl_register_losses():
    return [Component("acme_clean", "acme_clean:Never", summary="x", facts={"needs": ("rollout",)})]
"""


@pytest.fixture(scope="module")
def recipe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("dance")
    build_random(folder / "tiny-sd3", seed=0)
    return write_recipe(folder, folder / "tiny-sd3", TEXT)


def problems_of(recipe: Path, *sets: str) -> list[tuple[str, str]]:
    """Return what ``drl config check`` would say, place and message."""
    try:
        load_recipe(recipe, sets=sets, catalog=Catalog.load())
    except RecipeError as error:
        return [(problem.path, problem.message) for problem in error.problems]
    return []


def test_a_run_on_policy_has_parity_zero_at_every_step(recipe: Path, tmp_path: Path) -> None:
    run_here(recipe, tmp_path / "run", "algorithm.kl_beta=0.1", "eval.datasets=[]")
    parity = summary_of(tmp_path / "run")["parity"]
    assert parity["rows"] == 16
    assert set(parity["by_step"].values()) == {0.0}
    rows = [row for row in metric_rows(tmp_path / "run") if row["step"] >= 0]
    assert [row["train/ratio_mean_update_0"] for row in rows] == [1.0, 1.0]
    assert all(row["train/grad_norm"] > 0 for row in rows)
    verdicts = (tmp_path / "run" / "sync.jsonl").read_text().splitlines()
    assert {json.loads(line)["verdict"] for line in verdicts} == {"checksum equal"}


@pytest.mark.parametrize(
    "sets",
    [
        (),
        ("sde.log_prob_no_const=true",),
        ("sde.noise_level=0.3", "algorithm.kl_beta=0.1", "sde.sde_window.range=[0, 4]"),
    ],
    ids=["plain", "without constants", "KL with the last step"],
)
def test_recipes_that_make_sense_pass(recipe: Path, sets: tuple[str, ...]) -> None:
    assert problems_of(recipe, *sets) == []


@pytest.mark.parametrize(
    ("setting", "place", "reason"),
    [
        ("sde.noise_level=0", "sde.noise_level", "noise level 0 gives no density"),
        ("sde.noise_level=-0.1", "sde.noise_level", "must be at least 0"),
        ("sde.noise_level=nan", "sde.noise_level", "must be a finite number"),
        ("sde.dance.eta=0.3", "sde.dance.eta", "'dance' has no options"),
        ("sde.num_steps=0", "sde.num_steps", "needs the number of stochastic steps"),
    ],
)
def test_recipes_that_make_no_sense_are_refused_once_with_the_reason(
    recipe: Path, setting: str, place: str, reason: str
) -> None:
    ((path, message),) = problems_of(recipe, setting)
    assert path == place
    assert reason in message


def test_no_noise_is_refused_for_a_loss_that_uses_rollouts_without_their_steps(
    recipe: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_distribution(
        tmp_path, "acme-clean", {"acme_clean.py": LOSS_ON_CLEAN_LATENTS}, entry_point="acme_clean"
    )
    monkeypatch.syspath_prepend(tmp_path)
    importlib.invalidate_caches()
    clean = ("algorithm.loss=acme_clean", "sde.noise_level=0")
    ((path, message),) = problems_of(recipe, *clean)
    assert path == "sde.noise_level"
    assert "sde.type 'dance' has no density without noise" in message
    assert "use sde.type 'ode'" in message
    assert problems_of(recipe, *clean, "sde.type=ode") == []


def test_a_loss_without_rollouts_takes_no_step_that_needs_noise(recipe: Path) -> None:
    supervised = ("algorithm.loss=sft_loss", "train.train_only=true", "sde.noise_level=0")
    assert problems_of(recipe, *supervised) == []

"""``dpo`` in runs of the tiny model, and the recipes that are refused or warned of."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from e2e import metric_rows, run_here

from drl.catalog import Catalog
from drl.config import load_recipe
from drl.errors import DataError, RecipeError
from drl_family_sd3.tiny import build_random

RECIPES = Path(__file__).parents[4] / "recipes"

RECIPE = """
[model]
checkpoint = "tiny-sd3"

[lora]
enabled = true
rank = 4
alpha = 8

[data]
source = "preferences"
prompt_data = "preferences.jsonl"

[sampling]
width = 32
height = 32

[rollout]
batch_size = 3

[algorithm]
loss = "dpo"

[algorithm.dpo]
beta = 200.0

[train]
train_only = true
num_rollout = 8
micro_batch_size = 3

[optimizer]
lr = 3e-3
"""


@pytest.fixture(scope="module")
def recipe(
    tmp_path_factory: pytest.TempPathFactory, make_preferences: Callable[[Path, int], Path]
) -> Path:
    """Three preferences, a tiny pipeline with random weights, and the recipe that trains on them."""
    folder = tmp_path_factory.mktemp("dpo")
    build_random(folder / "tiny-sd3", seed=0)
    make_preferences(folder, 3)
    path = folder / "tiny.toml"
    path.write_text(RECIPE)
    return path


@pytest.fixture(scope="module")
def learnt(recipe: Path) -> list[dict[str, Any]]:
    """Figures of a run of the recipe as it is, which finds nothing that an earlier test encoded."""
    run_here(recipe, recipe.parent / "learnt", f"data.sft_cache={recipe.parent / 'encoded'}")
    return metric_rows(recipe.parent / "learnt")


def problems(recipe: Path, *sets: str) -> str:
    with pytest.raises(RecipeError) as refusal:
        load_recipe(recipe, sets=sets, catalog=Catalog.load())
    return str(refusal.value)


def warnings(recipe: Path, *sets: str) -> str:
    loaded = load_recipe(recipe, sets=sets, catalog=Catalog.load())
    return "\n".join(f"{problem.path} {problem.message}" for problem in loaded.warnings)


def test_training_learns_to_prefer_and_encodes_each_file_once(learnt: list[dict[str, Any]]) -> None:
    first, last = learnt[0], learnt[-1]
    assert all(math.isfinite(value) for row in learnt for value in row.values())
    assert first["train/loss"] == pytest.approx(math.log(2.0), abs=1e-6)
    assert (first["train/dpo_margin"], first["train/dpo_accuracy"]) == (0.0, 0.5)
    assert last["train/dpo_accuracy"] == 1.0
    assert last["train/loss"] < 0.6
    assert last["train/dpo_chosen_gain"] > last["train/dpo_rejected_gain"]
    assert [row["rollout/sft_cache_miss"] for row in learnt] == [3.0, *[0.0] * 7]
    assert last["rollout/sft_epoch"] == 7.0


def test_micro_batches_do_not_change_what_is_learnt(
    recipe: Path, tmp_path: Path, learnt: list[dict[str, Any]]
) -> None:
    sets = ["train.micro_batch_size=2", "train.num_rollout=2", "optimizer.lr_decay_iters=8"]
    run_here(recipe, tmp_path / "run", *sets)
    for row, right in zip(metric_rows(tmp_path / "run"), learnt, strict=False):
        figures = {name: row[name] for name in row if name.startswith("train/")}
        assert figures == pytest.approx({name: right[name] for name in figures}, rel=1e-3, abs=1e-5)


def test_beta_changes_what_is_learnt(
    recipe: Path, tmp_path: Path, learnt: list[dict[str, Any]]
) -> None:
    sets = ["algorithm.dpo.beta=20.0", "train.num_rollout=2", "optimizer.lr_decay_iters=8"]
    run_here(recipe, tmp_path / "run", *sets)
    assert metric_rows(tmp_path / "run")[1]["train/dpo_margin"] != learnt[1]["train/dpo_margin"]


def test_an_average_may_be_the_reference_of_full_weights(recipe: Path, tmp_path: Path) -> None:
    average = ["lora.enabled=false", "ema.enabled=true", "ema.decay_flat_steps=9"]
    frozen = [*average, "ema.decay_init=1.0", "optimizer.lr=1e-5", "train.num_rollout=2"]
    assert load_recipe(recipe, sets=frozen, catalog=Catalog.load()).algorithm.ref_mode == "ema"
    run_here(recipe, tmp_path / "run", *frozen)
    first, *_, last = metric_rows(tmp_path / "run")
    assert first["train/loss"] == pytest.approx(math.log(2.0), abs=1e-6)
    assert last["train/dpo_margin"] != 0.0


def test_a_preference_without_its_picture_is_named_or_skipped(
    recipe: Path, tmp_path: Path, make_preferences: Callable[[Path, int], Path]
) -> None:
    rows = make_preferences(tmp_path, 3)
    (tmp_path / "pictures" / "1-rejected.png").unlink()
    sets = [f"data.prompt_data={rows}", "train.num_rollout=1"]
    with pytest.raises(DataError, match=r"1-rejected\.png"):
        run_here(recipe, tmp_path / "refused", *sets)
    run_here(recipe, tmp_path / "run", *sets, "data.on_broken_row=skip")
    (row,) = metric_rows(tmp_path / "run")
    assert row["rollout/sft_broken_rows"] == 1.0


def test_the_reference_is_the_base_of_adapters_unless_told_otherwise(recipe: Path) -> None:
    assert load_recipe(recipe, catalog=Catalog.load()).algorithm.ref_mode == "lora_base"
    assert warnings(recipe) == ""


@pytest.mark.parametrize(
    ("sets", "path", "reason"),
    [
        (["algorithm.ref_mode=none"], "algorithm.ref_mode", "compares with a reference"),
        (["lora.enabled=false"], "algorithm.ref_mode", "'ema' with ema.enabled = true"),
        (["algorithm.ref_mode=ema"], "algorithm.ref_mode", "set ema.enabled = true"),
        (["data.source=jsonl"], "data.source", "'jsonl' gives no pairs"),
        (["train.train_only=false"], "train.train_only", "trains on recorded data"),
        (["algorithm.dpo.beta=0.0"], "algorithm.dpo.beta", "above 0"),
        (["logging.loggers=['preferences']"], "logging.loggers", "train.train_only has none"),
    ],
)
def test_what_makes_no_sense_is_refused_with_the_reason(
    recipe: Path, sets: list[str], path: str, reason: str
) -> None:
    text = problems(recipe, *sets)
    assert path in text
    assert reason in text


def test_the_source_needs_its_file(recipe: Path) -> None:
    without = recipe.with_name("without.toml")
    without.write_text(RECIPE.replace('prompt_data = "preferences.jsonl"', ""))
    assert "is required by data.source 'preferences'" in problems(without)


def test_what_is_not_read_is_said(recipe: Path) -> None:
    assert "algorithm.kl_beta is not read" in warnings(recipe, "algorithm.kl_beta=0.1")
    other = warnings(recipe, "algorithm.loss=sft_loss")
    assert "data.source 'preferences' gives two pictures a row" in other


def test_the_shipped_recipes_fit_each_other(recipe: Path) -> None:
    made = load_recipe(RECIPES / "glyphs_preferences.toml", catalog=Catalog.load())
    data = [f"data.prompt_data={recipe.with_name('preferences.jsonl')}"]
    trained = load_recipe(RECIPES / "quickstart_dpo.toml", sets=data, catalog=Catalog.load())
    assert made.warnings == trained.warnings == ()
    assert made.model.checkpoint == trained.model.checkpoint
    assert (made.sampling.width, made.sampling.height) == (48, 16)
    assert (trained.sampling.width, trained.sampling.height) == (48, 16)


def test_supervised_training_takes_the_chosen_pictures_alone(recipe: Path, tmp_path: Path) -> None:
    """Another picture in the place of the rejected one changes nothing."""
    rows = [json.loads(line) for line in recipe.with_name("preferences.jsonl").open()]
    other = [{**row, "rejected": rows[n - 1]["chosen"]} for n, row in enumerate(rows)]
    path = recipe.with_name("other.jsonl")
    path.write_text("".join(json.dumps(row) + "\n" for row in other))
    sets = ["algorithm.loss=sft_loss", "train.num_rollout=1"]
    run_here(recipe, tmp_path / "one", *sets)
    run_here(recipe, tmp_path / "other", *sets, f"data.prompt_data={path}")
    (one,), (two,) = (metric_rows(tmp_path / name) for name in ("one", "other"))
    assert one["train/loss"] == two["train/loss"]
    assert one["train/grad_norm"] == two["train/grad_norm"]


def test_the_logger_needs_groups_of_pictures(recipe: Path) -> None:
    rollouts = ["algorithm.loss=awm", "train.train_only=false", "reward.type=jpeg"]
    sets = [*rollouts, "logging.loggers=['preferences']", "rollout.n_samples_per_prompt=1"]
    text = problems(recipe, *sets, "sampling.num_frames=5")
    assert "pairs samples of one prompt" in text
    assert "writes pictures: set it to 1" in text


def test_pairs_made_by_a_run_train_the_loss(recipe: Path, tmp_path: Path) -> None:
    """From prompts to pictures to preferences to training, with nothing done by hand."""
    prompts = [{"input": f"sign number {n}"} for n in range(2)]
    (tmp_path / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in prompts))
    sets = ["data.source=jsonl", f"data.prompt_data={tmp_path / 'prompts.jsonl'}"]
    sets += ["algorithm.loss=nft", "train.train_only=false", "reward.type=jpeg", "sde.type=ode"]
    sets += ["rollout.n_samples_per_prompt=4", "rollout.batch_size=2", "sampling.num_steps=2"]
    sets += ["sampling.guidance_scale=1.0", "logging.loggers=['jsonl', 'preferences']"]
    sets += [
        "logging.preferences.pairs_per_group=2",
        "train.num_rollout=1",
        "debug.rollout_only=true",
    ]
    run_here(recipe, tmp_path / "made", *sets)
    rows = tmp_path / "made" / "preferences" / "preferences.jsonl"
    assert len(rows.read_text().splitlines()) == 4
    run_here(recipe, tmp_path / "trained", f"data.prompt_data={rows}", "train.num_rollout=2")
    assert metric_rows(tmp_path / "trained")[-1]["train/grad_norm"] > 0

"""The recipes for Stable Diffusion 3.5 on one card: valid offline, alike where they should be, and they run."""

from __future__ import annotations

import json
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from blank_pipeline import write_blank
from e2e import metric_rows, run_here, set_words, summary_of
from gpu.pipelines import MEDIUM

from drl.catalog import Catalog
from drl.config import load_recipe
from drl.stages.pairs import batch_plan

FOLDER = Path(__file__).resolve().parents[1] / "recipes" / "sd3"
NAMES = ("flow_grpo_24gb", "flow_grpo_80gb", "nft_24gb", "nft_80gb")

Drl = Callable[..., tuple[int, str, str]]


def read(name: str) -> dict[str, Any]:
    return tomllib.loads((FOLDER / f"{name}.toml").read_text())


def options(name: str) -> dict[str, Any]:
    """Return the options that a recipe gives, by path."""
    found: dict[str, Any] = {}

    def walk(table: dict[str, Any], prefix: str) -> None:
        for key, value in table.items():
            if isinstance(value, dict):
                walk(value, f"{prefix}{key}.")
            else:
                found[f"{prefix}{key}"] = value

    walk(read(name), "")
    return found


def test_all_recipes_have_a_row_in_the_card() -> None:
    assert sorted(path.stem for path in FOLDER.glob("*.toml")) == sorted(NAMES)
    card = (FOLDER / "README.md").read_text()
    assert all(f"| `{name}.toml` |" in card for name in NAMES)


@pytest.mark.parametrize("name", NAMES)
def test_a_recipe_is_valid_without_its_weights_and_without_a_warning(
    drl: Drl, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.chdir(tmp_path)
    recipe = str(FOLDER / f"{name}.toml")
    assert drl("config", "check", recipe) == (0, f"{recipe} is valid\n", "")
    assert drl("run", recipe, "--dry-run")[0] == 0


def test_where_the_hub_cannot_be_reached_a_plan_has_the_batches_and_says_why_no_more(
    drl: Drl, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    code, out, err = drl("plan", str(FOLDER / "flow_grpo_24gb.toml"))
    assert code == 2
    assert "= 128 pairs each" in out
    assert "cannot read the config of transformer" in err


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_a_recipe_is_planned_to_fit_its_card(drl: Drl, tmp_path: Path, name: str) -> None:
    """With the transformer and VAE of the real model; text encoders of 80 GB recipes are small here."""
    blank = write_blank(tmp_path / "medium", MEDIUM)
    sets = set_words((f"model.checkpoint={blank}", "train.forward_dtype=bf16"))
    memory = "23.5GiB" if name.endswith("24gb") else "79GiB"
    options = ("--memory", memory, "--device-name", "NVIDIA H200", "--json")
    code, out, _ = drl("plan", str(FOLDER / f"{name}.toml"), *sets, *options)
    assert code == 0
    planned = json.loads(out)
    assert planned["fits"] is True


@pytest.mark.parametrize(
    ("name", "samples", "pairs", "micro_batches", "steps"),
    [
        ("flow_grpo_24gb", 64, 128, 16, 1),
        ("flow_grpo_80gb", 128, 1280, 160, 2),
        ("nft_24gb", 64, 576, 36, 1),
        ("nft_80gb", 64, 576, 36, 1),
    ],
)
def test_the_arithmetic_is_that_of_the_card(
    name: str, samples: int, pairs: int, micro_batches: int, steps: int
) -> None:
    recipe: Any = load_recipe(FOLDER / f"{name}.toml", catalog=Catalog.load())
    plan = batch_plan(recipe)
    assert recipe.rollout.batch_size * recipe.rollout.n_samples_per_prompt == samples
    assert samples * plan.pairs_per_sample == pairs
    assert pairs / recipe.train.micro_batch_size == micro_batches
    assert recipe.train.num_steps_per_rollout == steps
    row = next(
        line for line in (FOLDER / "README.md").read_text().splitlines() if f"`{name}.toml`" in line
    )
    assert [cell.strip() for cell in row.split("|")[4:6]] == [str(samples), f"{pairs:,}"]


LATE = "rollout.local.adapters"
"""Where the last steps train, merged adapters would move ratios by more than the clip range."""
SPARES = {
    "run.name",
    "model.gradient_checkpointing",
    "model.sd3.text_encoders",
    "model.sd3.decode_rows",
    "train.micro_batch_size",
    "rollout.local.rows",
}
"""Options by which a smaller card is made to do: no result depends on them beyond rounding."""
SMALLER = {"rollout.n_samples_per_prompt", "sde.num_steps", "sde.sde_window.range", LATE}


@pytest.mark.parametrize(("method", "also"), [("nft", set()), ("flow_grpo", SMALLER)])
def test_two_cards_train_the_same_but_for_what_the_card_says(method: str, also: set[str]) -> None:
    small, large = options(f"{method}_24gb"), options(f"{method}_80gb")
    differing = {key for key in small | large if small.get(key) != large.get(key)}
    assert differing <= SPARES | also
    assert also <= differing


def test_values_of_the_published_runs() -> None:
    grpo, nft = options("flow_grpo_80gb"), options("nft_80gb")
    for recipe in (grpo, nft):
        assert (recipe["lora.rank"], recipe["lora.alpha"]) == (32, 64)
    published = {
        "sampling.num_steps": 10,
        "sampling.guidance_scale": 4.5,
        "sde.noise_level": 0.7,
        "sde.num_steps": 10,
        "sde.sde_window.range": [0, 10],
        "algorithm.kl_beta": 0.04,
        "algorithm.policy_loss.clip_range": 1e-4,
        "algorithm.grpo.globalize_std": True,
        "rollout.n_samples_per_prompt": 16,
        "rollout.microgroup_size": 8,
        "train.global_batch_size": 64,
        "train.num_rollout": 600,
    }
    assert {key: grpo[key] for key in published} == published
    published = {
        "sde.type": "ode",
        "sde.noise_level": 0.0,
        "algorithm.nft.beta": 1.0,
        "algorithm.nft.timestep_fraction": 0.99,
        "algorithm.ref_mode": "ema",
        "ema.rollout_policy": "ema",
        "ema.decay_init": 0.001,
        "ema.decay_ramp": 0.001,
        "ema.decay_max": 0.5,
        "ema.decay_flat_steps": 0,
        "rollout.batch_size": 8,
        "rollout.n_samples_per_prompt": 8,
        "optimizer.lr": 3e-4,
        "optimizer.weight_decay": 1e-4,
        "eval.num_steps": 50,
        "eval.interval": 30,
    }
    assert {key: nft[key] for key in published} == published


@pytest.mark.parametrize("name", ["flow_grpo_24gb", "nft_24gb"])
def test_a_recipe_runs_with_a_tiny_model(tmp_path: Path, checkpoint: Path, name: str) -> None:
    """Every option as it is, but for the sizes, the reward, and compiling, which a CPU is slow at."""
    prompts = [json.loads(line) for line in (FOLDER / "signs" / "train.jsonl").open()][:2]
    data = tmp_path / "two.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in prompts))
    sets = (
        f"model.checkpoint={checkpoint}",
        f"data.prompt_data={data}",
        f'eval.datasets=[{{name="heldout",path="{data}"}}]',
        "eval.num_steps=2",
        "sampling.height=32",
        "sampling.width=32",
        "reward.type=jpeg",
        "rollout.batch_size=2",
        "rollout.n_samples_per_prompt=2",
        "rollout.microgroup_size=2",
        "train.num_rollout=1",
        "train.compile=false",
        "rollout.local.compile=false",
        "model.sd3.compile_vae=false",
        *(("train.global_batch_size=4",) if "grpo" in name else ()),
    )
    run_here(FOLDER / f"{name}.toml", tmp_path / "run", *sets)
    (row,) = [row for row in metric_rows(tmp_path / "run") if row["step"] == 0]
    assert row["train/grad_norm"] > 0
    assert "heldout" in summary_of(tmp_path / "run")

"""Rules across sections: batch arithmetic, densities, references, files, the learning rate."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

import pytest

from drl.catalog import Catalog
from drl.components import Component
from drl.config.batch import batch_knobs
from drl.errors import BatchError
from drl.plugins import GROUP

Problems = Callable[..., dict[str, str]]
Warnings = Callable[..., dict[str, str]]
Load = Callable[..., Any]
SUPERVISED = {
    "algorithm.loss": "sft_loss",
    "train.train_only": True,
    "reward.type": None,
    "sde.num_steps": 0,
    "sde.step_strategy": None,
}


@pytest.mark.parametrize(
    ("changes", "path", "said"),
    [
        ({"rollout.batch_size": None}, "rollout.batch_size", "is required"),
        ({"rollout.batch_size": 0}, "rollout.batch_size", "must be above 0"),
        ({"rollout.n_samples_per_prompt": -1}, "rollout.n_samples_per_prompt", "must be above 0"),
        (
            {"train.global_batch_size": 4},
            "train.global_batch_size",
            "B3: train.global_batch_size=4",
        ),
        (
            {"train.num_steps_per_rollout": 3},
            "train.num_steps_per_rollout",
            "B4: samples per rollout",
        ),
        (
            {"train.num_steps_per_rollout": None, "train.global_batch_size": 5},
            "train.global_batch_size",
            "B4: samples per rollout 16 is not divisible by train.global_batch_size=5",
        ),
        ({"train.micro_batch_size": 0}, "train.micro_batch_size", "must be above 0"),
        ({"train.num_rollout": None}, "train.num_rollout", "B17"),
        ({"train.num_rollout": 0}, "train.num_rollout", "only evaluates"),
        (
            {"rollout.over_sampling_batch_size": 3},
            "rollout.over_sampling_batch_size",
            "B16",
        ),
        ({"train.micro_batch_size_sample": 4}, "train.micro_batch_size_sample", "B7: set "),
    ],
)
def test_batch_rules(problems: Problems, changes: dict[str, Any], path: str, said: str) -> None:
    found = problems(changes)
    assert list(found) == [path]
    assert said in found[path]


def test_the_pair_arithmetic_of_the_concept_example() -> None:
    # 48 prompts of 16 samples in 2 optimizer steps
    assert batch_knobs(48 * 16, None, 2) == (384, 2)
    assert batch_knobs(48 * 16, 384, None) == (384, 2)
    assert batch_knobs(48 * 16, 384, 2) == (384, 2)


def test_knobs_that_contradict_each_other_name_the_right_value() -> None:
    with pytest.raises(BatchError, match=r"B3: .*=128 contradicts .* = 384$"):
        batch_knobs(768, 128, 2)


def test_micro_batches_that_are_not_full_are_filled_with_a_warning(warnings: Warnings) -> None:
    # 16 samples / 2 steps x 2 trained steps = 16 pairs
    assert warnings({"train.micro_batch_size": 8}) == {}
    assert warnings({"train.micro_batch_size": 5}) == {
        "train.micro_batch_size": "B9: 16 pairs per optimizer step is not a multiple of 5; "
        "4 rows of filler are added"
    }


@pytest.mark.parametrize(
    ("strategy", "extra", "pairs"),
    [
        ("all", {}, 8 * 10),
        ("epoch_global_random_choice", {"candidate_steps": [3, 5, 6]}, 8 * 2),
        ("sde_window", {"range": [0, 4]}, 8 * 2),
    ],
)
def test_pairs_follow_the_step_strategy(
    warnings: Warnings, strategy: str, extra: dict[str, Any], pairs: int
) -> None:
    changes = {"sde.step_strategy": strategy, "train.micro_batch_size": 1000}
    changes |= {f"sde.{strategy}.{key}": value for key, value in extra.items()}
    assert f"B9: {pairs} pairs" in warnings(changes)["train.micro_batch_size"]


def test_requests_larger_than_a_group_are_noted(warnings: Warnings) -> None:
    assert "a group has only" in warnings({"rollout.microgroup_size": 5})["rollout.microgroup_size"]


@pytest.mark.parametrize(
    ("changes", "path", "said"),
    [
        (
            {"sde.type": "ode"},
            "sde.type",
            "'ode' has no density, but algorithm.loss 'policy_loss' needs one; use 'cps' or 'dance' or 'sde'",
        ),
        ({"sde.noise_level": 0}, "sde.noise_level", "noise level 0 gives no density"),
        (
            {"sde.type": "cps", "sde.log_prob_no_const": False},
            "sde.log_prob_no_const",
            "sde.type 'cps' has a log-probability without constants only",
        ),
        (
            {"sde.step_strategy": None, "sde.num_steps": None},
            "sde.num_steps",
            "trains on stochastic steps",
        ),
        (
            {"sde.step_strategy": None, "sde.num_steps": 11},
            "sde.num_steps",
            "must be at most sampling.num_steps = 10, got 11",
        ),
        ({"sde.num_steps": None}, "sde.num_steps", "needs the number of stochastic steps"),
        ({"sde.sde_window.range": [4, 20]}, "sde.sde_window.range", "sampling.num_steps = 10"),
        (
            {"sde.step_strategy": "epoch_global_random_choice"},
            "sde.epoch_global_random_choice.candidate_steps",
            "has no safe default",
        ),
        ({"train.train_only": True}, "train.train_only", "'policy_loss' trains on rollouts"),
        ({"algorithm.loss": "sft_loss"}, "train.train_only", "must be true"),
        ({"reward.type": None}, "reward.type", "is required: what is rewarded; installed: jpeg"),
        (
            {"reward.terms": [{"name": "ocr"}]},
            "reward.type",
            "and reward.terms are both given",
        ),
        (
            {"algorithm.kl_beta": 0.1, "algorithm.ref_mode": "none"},
            "algorithm.ref_mode",
            "algorithm.kl_beta = 0.1 needs a reference; use 'lora_base'",
        ),
        (
            {"algorithm.kl_beta": 0.1, "lora": None},
            "algorithm.kl_beta",
            "set lora.enabled = true",
        ),
        (
            {"algorithm.ref_mode": "lora_base", "lora": None},
            "algorithm.ref_mode",
            "set lora.enabled = true",
        ),
        (
            {"algorithm.kl_beta": 0.1, "sde.type": "cps"},
            "algorithm.kl_beta",
            "keep step 9 out of the trained steps",
        ),
        (
            {"eval.interval": 2},
            "eval.interval",
            "there is nothing to evaluate",
        ),
        ({"data.prompt_data": None}, "data.prompt_data", "is required by data.source 'jsonl'"),
        ({"data.prompt_data": "gone.jsonl"}, "data.prompt_data", "there is no file"),
        ({"data.prompt_data": "x" * 5000}, "data.prompt_data", "there is no file"),
        ({"data.prompt_data": "."}, "data.prompt_data", "is a folder"),
        ({"data.prompt_data": "recipe.toml"}, "data.prompt_data", "must end in .jsonl"),
        ({"data.prompt_data": "empty.jsonl"}, "data.prompt_data", "is empty; give one row"),
        (
            {"eval.datasets": [{"name": "a", "path": "empty.jsonl"}]},
            "eval.datasets[0].path",
            "is empty; give one row",
        ),
        (
            {"eval.datasets": [{"name": "a", "path": "gone.jsonl"}]},
            "eval.datasets[0].path",
            "there is no file",
        ),
        (
            {
                "eval.datasets": [
                    {"name": "a", "path": "heldout.jsonl"},
                    {"name": "a", "path": "heldout.jsonl"},
                ]
            },
            "eval.datasets",
            "has two sets named 'a'",
        ),
        ({"optimizer.min_lr": 1.0}, "optimizer.min_lr", "must be at most optimizer.lr = 1e-06"),
        ({"optimizer.lr_warmup_init": 1.0}, "optimizer.lr_warmup_init", "must be at most"),
        (
            {"optimizer.lr_warmup_iters": 8},
            "optimizer.lr_warmup_iters",
            "must be below optimizer.lr_decay_iters = 8 (iterations x optimizer steps",
        ),
        (
            {"optimizer.lr_decay_style": "WSD", "optimizer.lr_wsd_decay_style": "cosine"},
            "optimizer.lr_wsd_decay_iters",
            "is required by optimizer.lr_decay_style 'WSD'",
        ),
        (
            {
                "optimizer.lr_decay_style": "WSD",
                "optimizer.lr_wsd_decay_style": "cosine",
                "optimizer.lr_wsd_decay_iters": 9,
            },
            "optimizer.lr_wsd_decay_iters",
            "must be at most optimizer.lr_decay_iters = 8, got 9",
        ),
    ],
)
def test_what_does_not_go_together_is_refused(
    problems: Problems, changes: dict[str, Any], path: str, said: str
) -> None:
    found = problems(changes)
    assert list(found) == [path]
    assert said in found[path]


@pytest.mark.parametrize(
    "changes",
    [
        {"sde.type": "cps"},
        {"sde.type": "cps", "sde.log_prob_no_const": True},
        {"algorithm.kl_beta": 0.1},
        {"algorithm.kl_beta": 0.1, "sde.type": "cps", "sde.sde_window.range": [0, 9]},
        {"train.num_rollout": 0, "eval.datasets": [{"name": "a", "path": "heldout.jsonl"}]},
        {"eval.interval": 0},
        SUPERVISED,
        {"optimizer.lr_warmup_iters": 7},
        {"optimizer.lr_decay_style": "inverse-square-root"},
        {"sampling.guidance_scale": 1.0},
        {"algorithm.grpo.globalize_std": True, "algorithm.grpo.globalize_mean": True},
    ],
)
def test_what_goes_together_gives_no_word(warnings: Warnings, changes: dict[str, Any]) -> None:
    wanted = {f"lora.{key}" for key in ("rank",) if "lora" in changes}
    assert set(warnings(changes)) == wanted


@pytest.mark.parametrize(
    ("changes", "path", "said"),
    [
        (
            {"rollout.n_samples_per_prompt": 1},
            "rollout.n_samples_per_prompt",
            "the standard deviation is not normalised",
        ),
        (
            {"algorithm.grpo.globalize_mean": True},
            "algorithm.grpo.globalize_mean",
            "mixes two scales",
        ),
        ({"sde.step_strategy": None}, "sde.step_strategy", "the first 2 steps"),
        ({"lora.enabled": False}, "lora.rank", "lora.enabled is false"),
        ({"algorithm.ref_mode": "lora_base"}, "algorithm.ref_mode", "algorithm.kl_beta is 0"),
        (
            {"optimizer.lr_warmup_fraction": 0.5, "optimizer.lr_warmup_iters": 2},
            "optimizer.lr_warmup_iters",
            "lr_warmup_fraction wins",
        ),
        ({"optimizer.lr_wsd_decay_iters": 2}, "optimizer.lr_wsd_decay_iters", "not 'WSD'"),
        (
            {**SUPERVISED, "eval.datasets": [{"name": "a", "path": "heldout.jsonl"}]},
            "eval.datasets",
            "runs without an engine",
        ),
        ({**SUPERVISED, "sde.type": "ode"}, "sde.type", "runs without rollouts"),
    ],
)
def test_what_is_odd_is_a_warning(
    warnings: Warnings, changes: dict[str, Any], path: str, said: str
) -> None:
    found = warnings(changes)
    assert list(found) == [path]
    assert said in found[path]


def test_one_sampler_is_not_evaluated_twice(warnings: Warnings) -> None:
    path = "eval.rollout_sampler"
    steps = {"sde.step_strategy": None, "sde.num_steps": 0}
    plain = {"algorithm.loss": "nft", "sde.type": "ode", path: True, **steps}
    assert "scores every held-out sample twice" in warnings(plain)[path]
    assert path not in warnings({**plain, path: False})
    assert path not in warnings({**plain, "eval.num_steps": 3})
    assert path not in warnings({path: True})


def test_a_wrong_value_draws_no_conclusions(problems: Problems) -> None:
    changes = {"sde.num_steps": "two", "sde.step_strategy": None, "train.num_rollout": -1}
    assert set(problems(changes)) == {"sde.num_steps", "train.num_rollout"}


def test_a_misspelt_option_draws_no_conclusions_from_its_default(problems: Problems) -> None:
    changes = {"rollout.n_samples_per_prompt": None, "rollout.n_samples_per_promt": 4}
    assert list(problems(changes)) == ["rollout.n_samples_per_promt"]


@pytest.fixture
def distilled() -> Catalog:
    """A catalog whose family sd3 has no guidance."""
    catalog = Catalog.load(installed=entry_points(group=GROUP))
    catalog._entries = [
        dataclasses.replace(entry, component=_unguided(entry.component))
        if entry.kind == "family"
        else entry
        for entry in catalog.entries()
    ]
    return catalog


def _unguided(component: Component) -> Component:
    return dataclasses.replace(component, facts={"guidance": "never"})


def test_a_distilled_family_runs_without_guidance(
    problems: Problems, load: Load, distilled: Catalog
) -> None:
    found = problems({"sampling.negative_prompt": "blurry"}, catalog=distilled)
    assert found == {
        "sampling.guidance_scale": "must be 1: family 'sd3' has no guidance, got 4.0",
        "sampling.negative_prompt": "has no use: family 'sd3' has no guidance",
    }
    assert load({"sampling.guidance_scale": 1}, catalog=distilled).sampling.guidance_scale == 1


def test_the_checkpoint_must_be_a_folder_or_a_hub_id(problems: Problems, folder: Path) -> None:
    for given in ("gone", "./gone", "/gone", "~nobody/gone", "x" * 5000):
        (message,) = problems({"model.checkpoint": given, "model.family": "sd3"}).values()
        assert message.startswith("there is no folder")

"""Whole runs in which functions of the recipe take the place of the loss's parts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from e2e import metric_rows, run_here, write_recipe

from drl.errors import BadInput, RecipeError

PARTS = """
import torch

from drl.api import BatchError, ForwardInputs, LossOutput, Metric, Need, StepContext, successor
from drl.mathematics.recorded import recorded_pairs

def expand(run, samples, advantages, rewards):
    assert rewards == [sample.reward for sample in samples]
    return [recorded_pairs(s, a, None) for s, a in zip(samples, advantages, strict=True)]

def convert(run, samples):
    mean = sum(sample.reward for sample in samples) / len(samples)
    return [recorded_pairs(s, s.reward - mean, None) for s in samples]

def prepare(pairs, context):
    assert isinstance(context, StepContext)
    return ForwardInputs(streams={"visual": pairs.tensors["visual"]})

def formula(pairs, inputs, predictions, transition):
    log_prob_B = transition.log_prob_B["visual"]
    advantage_B = pairs.values["advantage"].clamp(-5, 5)
    ratio_B = torch.exp(log_prob_B - pairs.values["log_prob_old"])
    loss_B = torch.maximum(-advantage_B * ratio_B, -advantage_B * ratio_B.clamp(0.99, 1.01))
    return LossOutput.weighted(loss_B, pairs.weight_B, {"ratio_mean": ratio_B})

def doubled(pairs, inputs, predictions, transition):
    output = formula(pairs, inputs, predictions, transition)
    return LossOutput(loss=2 * output.loss, metrics=output.metrics)

def halves(run, samples):
    raw = [10 * sample.reward for sample in samples]
    return raw, [0.5 if number % 2 else -0.5 for number in range(len(samples))]

def mean_square(pairs, inputs, predictions, transition):
    assert transition is None and predictions.reference is None
    loss_B = (predictions.trained["visual"].float() ** 2).flatten(1).mean(1)
    return LossOutput.weighted(loss_B, pairs.weight_B, {})

def without_values(run, samples, advantages, rewards):
    from dataclasses import replace
    units = [recorded_pairs(s, 0.0, None) for s in samples]
    return [[replace(p, values={"sigma_next": 0.0, "sigma_max": 1.0}) for p in u] for u in units]
"""

QUIET = (
    "train.num_rollout=1",
    "eval.datasets=[]",
    "checkpoint.every_minutes=100",
    "train.num_steps_per_rollout=2",
)
LOSS = "algorithm.loss=custom_loss"
EXPAND, CONVERT = (
    "rollout.custom_expand=acme_training:expand",
    "rollout.custom_convert=acme_training:convert",
)
PREPARE = "algorithm.custom_prepare=acme_training:prepare"
FORMULA = "algorithm.custom_loss=acme_training:formula"
SAME = ("train/loss", "train/ratio_mean", "train/grad_norm", "rollout/reward/raw_mean")


@pytest.fixture
def train(tmp_path: Path, checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Train one iteration of the tiny recipe with some settings; return its row."""
    (tmp_path / "acme_training.py").write_text(PARTS)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    recipe = write_recipe(tmp_path / "recipe", checkpoint)
    number = iter(range(9))

    def run(*sets: str) -> dict[str, Any]:
        folder = tmp_path / f"run-{next(number)}"
        run_here(recipe, folder, *QUIET, *sets)
        return metric_rows(folder)[-1]

    return run


def figures(row: dict[str, Any]) -> dict[str, float]:
    return {name: row[name] for name in SAME}


def test_functions_with_the_formula_of_a_loss_train_as_it_does(train: Any) -> None:
    named = train()
    custom = train(LOSS, EXPAND, PREPARE, FORMULA)
    assert figures(custom) == figures(named)
    assert named["train/ratio_abs_minus_1_update_1"] > 0
    twice = train("algorithm.custom_loss=acme_training:doubled")
    assert twice["train/loss"] == named["train/loss"]
    assert twice["train/grad_norm"] == pytest.approx(2 * named["train/grad_norm"], rel=1e-2)
    assert "train/clipfrac" not in twice, "the figures are the function's"


def test_convert_leaves_the_estimator_out(train: Any) -> None:
    row = train(CONVERT)
    assert row["train/adv_abs_mean"] > 0
    assert not any(name.startswith("rollout/reward/group") for name in row)


def test_processed_rewards_are_what_is_trained_on_and_logged(train: Any) -> None:
    plain, row = train(), train("reward.custom_post_process=acme_training:halves")
    assert row["train/adv_abs_mean"] == 0.5
    raw = "rollout/reward/raw_mean"
    assert row[raw] == pytest.approx(10 * plain[raw], rel=1e-5)


def test_a_loss_that_scores_nothing_needs_no_density(train: Any) -> None:
    row = train(
        LOSS,
        EXPAND,
        PREPARE,
        "algorithm.custom_loss=acme_training:mean_square",
        'algorithm.custom_needs=["rollout"]',
    )
    assert row["train/loss"] > 0
    assert "trust/parity_worst" not in row


def test_a_value_that_a_function_forgot_is_named(train: Any) -> None:
    expand = "rollout.custom_expand=acme_training:without_values"
    for parity in ("true", "false"):
        with pytest.raises(BadInput, match=r"'log_prob_old'.*rollout\.custom_expand"):
            train(expand, f"trust.parity={parity}")


def test_a_custom_loss_without_parts_is_refused_at_check_time(train: Any) -> None:
    with pytest.raises(RecipeError, match=r"missing: .*algorithm\.custom_prepare"):
        train(LOSS)


RECOMPUTE = ("algorithm.policy_loss.recompute_old_log_prob=true", "train.dp_split_mode=stride")


@pytest.mark.slow
@pytest.mark.parametrize(
    "settings", [(LOSS, EXPAND, PREPARE, FORMULA), RECOMPUTE], ids=["functions", "recompute"]
)
def test_every_rank_does_the_same(train: Any, settings: tuple[str, ...]) -> None:
    one, two = train(*settings), train(*settings, "cluster.actor_num_gpus_per_node=2")
    for name, value in figures(one).items():
        assert two[name] == pytest.approx(value, rel=1e-3, abs=1e-6), name


def test_recomputed_log_probs_train_and_say_how_far_the_engine_was(train: Any) -> None:
    plain, row = train(), train("algorithm.policy_loss.recompute_old_log_prob=true")
    assert row["train/ratio_mean_update_0"] == 1.0
    assert 0 <= row["train/log_prob_recompute_abs_diff"] < 1e-5
    assert "train/log_prob_recompute_abs_diff" not in plain
    assert row["train/loss"] == pytest.approx(plain["train/loss"], rel=1e-3, abs=1e-5)


def test_tiles_train_as_flat_micro_batches_do(train: Any) -> None:
    """2 tiles of 2 samples x 1 step in each order; only rounding differs."""
    plain = train("train.micro_batch_size=2")
    tile = ("train.micro_batch_size_sample=2", "train.micro_batch_size_tstep=1")
    for order in ("sample_major", "timestep_major"):
        row = train(*tile, f"train.iter_order={order}")
        for name, value in figures(plain).items():
            assert row[name] == pytest.approx(value, rel=1e-3, abs=1e-5), name


def test_dealt_samples_train_as_neighbours_do(train: Any) -> None:
    near = train()
    dealt = train("train.dp_split_mode=stride")
    assert figures(dealt) == figures(near), "one rank has every sample either way"

"""Recipes whose optimizer, dtypes and moving average do not go together, and those that do."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, get_args

import pytest

from drl.config.rules.optimizer import READ_BY
from drl.config.sections import OptimizerSection
from drl.model.optimizers import OPTIMIZERS

Problems = Callable[..., dict[str, str]]
Warnings = Callable[..., dict[str, str]]

EMA = {"ema.enabled": True, "ema.rollout_policy": "ema"}
REFERENCE = {"ema.enabled": True, "algorithm.ref_mode": "ema", "algorithm.kl_beta": 0.1}
SUPERVISED = {
    "algorithm.loss": "sft_loss",
    "train.train_only": True,
    "data.source": "glyphs",
    "data.prompt_data": None,
    "reward.type": None,
    "sde.step_strategy": None,
}


@pytest.mark.parametrize(
    ("changes", "path", "said"),
    [
        ({"ema.enabled": True}, "ema.enabled", "nothing uses the average: set ema.rollout_policy"),
        ({"ema.rollout_policy": "ema"}, "ema.rollout_policy", "set ema.enabled = true"),
        (
            {"algorithm.ref_mode": "ema", "algorithm.kl_beta": 0.1},
            "algorithm.ref_mode",
            "set ema.enabled = true",
        ),
        ({**SUPERVISED, **EMA}, "ema.rollout_policy", "train.train_only rolls nothing out"),
        (
            {"train.master_dtype": "bf16", "train.forward_dtype": "fp32"},
            "train.master_dtype",
            "must be 'fp32' or train.forward_dtype = 'fp32', got 'bf16'",
        ),
        (
            {"train.master_dtype": "fp16", "train.forward_dtype": "bf16"},
            "train.master_dtype",
            "must be 'fp32' or train.forward_dtype = 'bf16', got 'fp16'",
        ),
        (
            {"train.master_dtype": "fp16", "train.forward_dtype": "fp16"},
            "optimizer.eps",
            "must be at least 0.0001 with train.master_dtype 'fp16', got 1e-08",
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
    ("changes", "path", "said"),
    [
        (EMA, "ema.rollout_policy", "its ratio starts away from 1"),
        ({**REFERENCE, "ema.decay_init": 0.1}, "ema.decay_init", "decay_flat_steps is 0"),
        (
            # the third schedule of the original DiffusionNFT code
            {
                **REFERENCE,
                "ema.decay_init": 0.0,
                "ema.decay_flat_steps": 75,
                "ema.decay_ramp": 0.0075,
                "ema.decay_max": 0.999,
            },
            "ema.decay_init",
            "in the first 75 updates the average equals the trained weights",
        ),
        (
            {**REFERENCE, "ema.decay_ramp": 0},
            "ema.decay_ramp",
            "after the flat updates the average",
        ),
        ({**REFERENCE, "ema.decay_max": 0.0}, "ema.decay_max", "learns nothing from it"),
        ({"ema.decay_max": 0.9}, "ema.decay_max", "is not used: ema.enabled is false"),
        (
            {"algorithm.ref_mode": "ema", "ema.enabled": True},
            "algorithm.ref_mode",
            "algorithm.kl_beta is 0",
        ),
        ({"optimizer.name": "sgd", "optimizer.beta2": 0.95}, "optimizer.beta2", "'adam' reads it"),
        ({"optimizer.momentum": 0.5}, "optimizer.momentum", "'sgd' reads it"),
        (
            {
                "train.master_dtype": "bf16",
                "train.forward_dtype": "bf16",
                "optimizer.lr": 1e-4,
            },
            "train.master_dtype",
            "updates below 1/512 of a weight: at optimizer.lr = 0.0001 weights above about 0.051 do not",
        ),
        (
            {
                "train.master_dtype": "fp16",
                "train.forward_dtype": "fp16",
                "optimizer.lr": 1e-4,
                "optimizer.eps": 1e-4,
            },
            "train.master_dtype",
            "updates below 1/4096 of a weight: at optimizer.lr = 0.0001 weights above about 0.41 do not",
        ),
    ],
)
def test_what_is_odd_is_a_warning(
    warnings: Warnings, changes: dict[str, Any], path: str, said: str
) -> None:
    found = warnings(changes)
    assert list(found) == [path]
    assert said in found[path]


@pytest.mark.parametrize(
    "changes",
    [
        REFERENCE,
        {**REFERENCE, "lora": None},
        {**REFERENCE, "ema.decay_init": 0.5, "ema.decay_flat_steps": 1},
        {"train.forward_dtype": "fp16"},
        {"optimizer.name": "sgd", "optimizer.momentum": 0.5},
        # options at their defaults are no decision of the user's: a resolved recipe has them all
        {"optimizer.name": "sgd", "optimizer.beta2": 0.999},
        {"ema.decay_max": 0.5, "ema.decay_init": 0.001},
    ],
)
def test_what_goes_together_gives_no_word(warnings: Warnings, changes: dict[str, Any]) -> None:
    assert set(warnings(changes)) - {"lora.rank"} == set()


def test_the_recipe_knows_the_optimizers_of_the_registry() -> None:
    assert get_args(OptimizerSection.model_fields["name"].annotation) == tuple(OPTIMIZERS)
    assert READ_BY.keys() == OPTIMIZERS.keys()
    assert set().union(*READ_BY.values()) < OptimizerSection.model_fields.keys()

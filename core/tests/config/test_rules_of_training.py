"""Rules about tiles, the dealing of samples and the functions that replace parts of the training."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from drl.stages.pairs import batch_plan

Problems = Callable[..., dict[str, str]]
Warnings = Callable[..., dict[str, str]]
Load = Callable[..., Any]
SAMPLES, STEPS = "train.micro_batch_size_sample", "train.micro_batch_size_tstep"

FUNCTIONS = """
from drl.api import ForwardInputs

def expand(run, samples, advantages, rewards):
    return []

def convert(run, samples):
    return []

def prepare(pairs, context):
    return ForwardInputs(streams={})

def formula(pairs, inputs, predictions, transition):
    raise NotImplementedError

def process(run, samples):
    return [], []
"""

CUSTOM = {
    "algorithm.loss": "custom_loss",
    "rollout.custom_expand": "acme_parts:expand",
    "algorithm.custom_prepare": "acme_parts:prepare",
    "algorithm.custom_loss": "acme_parts:formula",
}


@pytest.fixture(autouse=True)
def functions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A module with a function for every slot of the training."""
    (tmp_path / "acme_parts.py").write_text(FUNCTIONS)
    monkeypatch.syspath_prepend(tmp_path)


@pytest.mark.parametrize(("given", "other"), [(SAMPLES, STEPS), (STEPS, SAMPLES)])
def test_b7_the_sizes_of_a_tile_come_together(problems: Problems, given: str, other: str) -> None:
    found = problems({given: 2})
    assert list(found) == [given]
    assert found[given] == f"B7: set {SAMPLES} and {STEPS} together, or neither of them"
    assert other in found[given]


def test_b10_tiles_must_be_full(problems: Problems, load: Load) -> None:
    # 16 samples in 2 optimizer steps: 8 a step, of 2 trained steps each
    assert problems({SAMPLES: 3, STEPS: 2}) == {
        SAMPLES: "B10: tiles of 3 leave a rest of 8 samples of an optimizer step on a rank; it needs "
        "uniform tiles: use one of 1, 2, 4, 8"
    }
    found = problems({SAMPLES: 3, STEPS: 2, "sde.num_steps": 3})
    assert list(found) == [SAMPLES, STEPS]
    assert "tiles of 2 leave a rest of 3 trained steps of a sample" in found[STEPS]
    for samples, steps in ((4, 2), (8, 1), (1, 1), (99, 99)):
        assert load({SAMPLES: samples, STEPS: steps}).warnings == ()


def test_b10_counts_the_samples_of_a_rank(problems: Problems, load: Load) -> None:
    ranks = {"cluster.actor_num_gpus_per_node": 2, STEPS: 2}
    assert "rest of 4 samples" in problems({**ranks, SAMPLES: 3})[SAMPLES]
    load({**ranks, SAMPLES: 4})


def test_a_tile_is_what_the_plan_says(load: Load) -> None:
    recipe = load({SAMPLES: 4, STEPS: 1, "train.iter_order": "timestep_major"})
    (line,) = [line for line in batch_plan(recipe).lines() if "micro-batches" in line]
    assert "4 micro-batches of 4 pairs (4 samples x 1 steps, timestep_major)" in line


def test_a_tile_overrides_the_flat_size(warnings: Warnings) -> None:
    tile = {SAMPLES: 4, STEPS: 2}
    assert warnings({**tile, "train.micro_batch_size": 8}) == {}
    found = warnings({**tile, "train.micro_batch_size": 3})
    assert found["train.micro_batch_size"].startswith("3 is not used: a forward has 4 samples x 2")


def test_an_order_without_tiles_is_not_used(warnings: Warnings) -> None:
    order = {"train.iter_order": "timestep_major"}
    assert "is not used: micro-batches are flat" in warnings(order)["train.iter_order"]
    assert warnings({**order, SAMPLES: 4, STEPS: 2}) == {}


def test_dealing_needs_ranks_to_deal_to(warnings: Warnings) -> None:
    stride = {"train.dp_split_mode": "stride"}
    assert "changes nothing on one rank" in warnings(stride)["train.dp_split_mode"]
    assert warnings({**stride, "cluster.actor_num_gpus_per_node": 2}) == {}


def test_a_whole_custom_loss_is_accepted(load: Load) -> None:
    recipe = load(CUSTOM)
    assert recipe.warnings == ()
    assert recipe.algorithm.custom_needs == ("rollout", "old_log_prob", "transition", "guidance")


@pytest.mark.parametrize(
    ("without", "missing"),
    [
        (["rollout.custom_expand"], "rollout.custom_expand or rollout.custom_convert"),
        (["algorithm.custom_prepare"], "algorithm.custom_prepare"),
        (["algorithm.custom_loss"], "algorithm.custom_loss"),
        (
            list(CUSTOM)[1:],
            "rollout.custom_expand or rollout.custom_convert, algorithm.custom_prepare, "
            "algorithm.custom_loss",
        ),
    ],
)
def test_custom_loss_names_every_function_it_lacks(
    problems: Problems, without: list[str], missing: str
) -> None:
    assert problems(CUSTOM | dict.fromkeys(without)) == {
        "algorithm.loss": f"is 'custom_loss', which consists of functions; missing: {missing}"
    }


def test_convert_stands_for_expand(load: Load) -> None:
    load({**CUSTOM, "rollout.custom_expand": None, "rollout.custom_convert": "acme_parts:convert"})


def test_needs_of_custom_loss_are_an_option(problems: Problems, load: Load) -> None:
    """Rules about what a loss needs hold for it too: without a transition no step needs a density."""
    assert "has no density" in problems({**CUSTOM, "sde.type": "ode"})["sde.type"]
    load({**CUSTOM, "sde.type": "ode", "algorithm.custom_needs": ["rollout"]})
    supervised = {"algorithm.custom_needs": []}
    assert "must be true" in problems({**CUSTOM, **supervised})["train.train_only"]
    found = problems({**CUSTOM, "algorithm.custom_needs": ["rollout", "gradients"]})
    assert any(path.startswith("algorithm.custom_needs") for path in found)


def test_needs_of_another_loss_are_its_own(warnings: Warnings) -> None:
    found = warnings({"algorithm.custom_needs": ["rollout"]})
    assert "the loss is 'policy_loss'" in found["algorithm.custom_needs"]


def test_convert_replaces_what_stands_before_the_trainer(warnings: Warnings) -> None:
    found = warnings(
        {
            "rollout.custom_convert": "acme_parts:convert",
            "rollout.custom_expand": "acme_parts:expand",
            "reward.custom_post_process": "acme_parts:process",
        }
    )
    assert list(found) == ["rollout.custom_expand", "reward.custom_post_process"]
    assert all("rollout.custom_convert makes pairs" in text for text in found.values())


def test_nobody_guesses_how_many_pairs_a_function_makes(load: Load) -> None:
    expand = {"rollout.custom_expand": "acme_parts:expand", "train.micro_batch_size": 5}
    assert load(expand).warnings == ()
    load({**expand, SAMPLES: 3, STEPS: 7})


def test_functions_may_replace_parts_of_a_named_loss(load: Load) -> None:
    recipe = load({"algorithm.custom_loss": "acme_parts:formula"})
    assert recipe.algorithm.loss == "policy_loss"
    assert recipe.algorithm.custom_loss == "acme_parts:formula"


def test_recomputing_belongs_to_the_policy_loss(problems: Problems, load: Load) -> None:
    option = "recompute_old_log_prob"
    recipe = load({f"algorithm.policy_loss.{option}": True})
    assert recipe.options("loss", "policy_loss").recompute_old_log_prob
    found = problems({"algorithm.loss": "grpo_guard", f"algorithm.grpo_guard.{option}": True})
    assert "unknown option" in found[f"algorithm.grpo_guard.{option}"]

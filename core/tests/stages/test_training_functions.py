"""Functions of the recipe between rewards and gradients: what they get, and what they must return."""

from __future__ import annotations

import math
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from drl.builtin.loss_custom import CustomLoss
from drl.errors import BadInput
from drl.stages.advantage import estimate
from drl.stages.functions import (
    CONVERT,
    EXPAND,
    FORMULA,
    POST_PROCESS,
    PREPARE,
    FunctionLoss,
    checked_units,
    chosen_units,
    processed_rewards,
    with_functions,
)
from drl.testing import make_pair, make_sample
from drl.testing.contracts.loss_driver import batch_of
from drl.types import (
    VISUAL,
    Context,
    ForwardInputs,
    Group,
    LossOutput,
    Need,
    Predictions,
    Rollout,
    StepContext,
)


def run_with(**chosen: Any) -> Any:
    names = {"convert": CONVERT, "expand": EXPAND, "process": POST_PROCESS}
    functions = {names[key]: function for key, function in chosen.items()}
    return SimpleNamespace(functions=functions, advantage=object(), rewards=None)


def samples_with(*rewards: float | None) -> list[Any]:
    return [
        make_sample(index=7 + n, member=n, seed=n, reward=reward)
        for n, reward in enumerate(rewards)
    ]


def test_without_a_function_the_loss_expands_itself() -> None:
    assert chosen_units(run_with(), samples_with(1.0), [0.5]) is None


def test_expand_sees_samples_advantages_and_rewards() -> None:
    seen = []
    units = [[make_pair(id=(0, 0))], []]

    def expand(*arguments: Any) -> Any:
        seen.append(arguments)
        return units

    run, samples = run_with(expand=expand), samples_with(1.0, None)
    assert chosen_units(run, samples, [0.5, 0.0]) == units
    assert seen == [(run, samples, [0.5, 0.0], [1.0, None])]


def test_convert_wins_and_sees_the_samples_alone() -> None:
    run, samples = run_with(convert=lambda run, s: [[make_pair()]], expand=pytest.fail), [1, 2]
    assert len(chosen_units(run, samples, None) or ()) == 1


def test_with_convert_no_advantages_are_estimated() -> None:
    made = Rollout(rollout_id=0, version=0, groups=[])
    assert estimate(run_with(convert=lambda run, s: []), made) is None


@pytest.mark.parametrize(
    ("units", "words"),
    [
        (None, "one list of pairs per unit .*got NoneType None"),
        ({"train_data": []}, "one list of pairs per unit .*got dict"),
        ([make_pair()], "one list of pairs per unit"),
        ("pairs", "one list of pairs per unit .*got str 'pairs'"),
        ([[{"latent": 1}]], "must return drl.api.Pair objects, got dict {'latent': 1}"),
        ([[make_pair(weight=-1.0)]], r"pair \(0, 0\) has weight -1.0; use 1, or 0"),
        ([[make_pair(weight=math.nan)]], r"pair \(0, 0\) has weight nan"),
        ([[make_pair()], [make_pair()]], r"two pairs have the id \(0, 0\)"),
        (
            [[make_pair(values={"advantage": 1.0}), make_pair(id=(0, 1))]],
            r"pair \(0, 1\) has the tensors and values .*, the first pair .*'advantage'",
        ),
    ],
)
def test_anything_but_units_of_pairs_is_refused(units: Any, words: str) -> None:
    with pytest.raises(BadInput, match=rf"rollout\.custom_expand.*{words}"):
        checked_units(units, EXPAND)


def test_units_may_be_empty_and_tuples() -> None:
    units = ((make_pair(id=(0,)), make_pair(id=(1,))), ())
    assert checked_units(units, CONVERT) == list(units)


def test_processed_rewards_replace_the_estimator() -> None:
    samples = samples_with(1.0, 3.0)
    run = run_with(process=lambda run, s: ([10.0, 30.0], [-2.0, 2.0]))
    made = Rollout(
        rollout_id=0,
        version=0,
        groups=[Group(group_index=0, prompt=samples[0].prompt, samples=samples)],
    )
    advantages = estimate(run, made)
    assert advantages is not None
    assert advantages.values.tolist() == [-2.0, 2.0]
    assert advantages.values.dtype == torch.float32
    assert [sample.reward for sample in samples] == [10.0, 30.0], "raw rewards are logged"


def test_arrays_and_tensors_are_lists_of_numbers_too() -> None:
    both = torch.tensor([1.0, 2.0]), torch.tensor([0.5, -0.5]).numpy()
    advantages = processed_rewards(run_with(process=lambda run, s: both), samples_with(0.0, 0.0))
    assert advantages is not None
    assert advantages.values.tolist() == [0.5, -0.5]


def test_a_failed_sample_stays_without_reward_and_weight() -> None:
    samples = samples_with(None, 1.0)
    run = run_with(process=lambda run, s: ([None, 1.0], [math.nan, 1.5]))
    advantages = processed_rewards(run, samples)
    assert advantages is not None
    assert advantages.values.tolist() == [0.0, 1.5]
    assert samples[0].reward is None


@pytest.mark.parametrize(
    ("result", "words"),
    [
        ([1.0, 2.0, 3.0], "two lists, raw and normalised rewards, got list"),
        (None, "two lists, raw and normalised rewards, got NoneType"),
        (([1.0], [1.0, 2.0]), r"one raw reward per sample \(2\), got 1"),
        (([1.0, 2.0], [1.0]), r"one normalised reward per sample \(2\), got 1"),
        (([1.0, 2.0], [1.0, math.inf]), "sample 8 has the raw reward 2.0 and the normalised"),
        (([1.0, math.nan], [1.0, 2.0]), "sample 8 has the raw reward nan"),
    ],
)
def test_rewards_of_another_length_or_without_value_are_refused(result: Any, words: str) -> None:
    with pytest.raises(BadInput, match=rf"custom_post_process.*{words}"):
        processed_rewards(run_with(process=lambda run, s: result), samples_with(1.0, 2.0))


SECTION = SimpleNamespace(custom_needs=("rollout", "transition"), kl_beta=0.0)
NO_PREDICTION = Predictions(trained={})


def custom() -> CustomLoss:
    return CustomLoss(None, Context(section=SECTION))


def doubled(pairs: Any, context: StepContext) -> ForwardInputs:
    return ForwardInputs(streams={VISUAL: 2 * pairs.tensors[VISUAL]})


def constant(loss: Any) -> Callable[..., Any]:
    return lambda pairs, inputs, predictions, transition: loss


def test_custom_loss_needs_what_the_recipe_says() -> None:
    assert custom().needs == {Need.ROLLOUT, Need.TRANSITION}
    section = SimpleNamespace(custom_needs=(), kl_beta=0.1)
    assert CustomLoss(None, Context(section=section)).needs == {Need.REFERENCE}


def test_custom_loss_has_no_part_of_its_own() -> None:
    loss, batch = custom(), batch_of([make_pair()])
    with pytest.raises(BadInput, match=r"set rollout\.custom_expand or rollout\.custom_convert"):
        loss.expand([], None, StepContext())
    with pytest.raises(BadInput, match=r"set algorithm\.custom_prepare"):
        loss.prepare(batch, StepContext())
    with pytest.raises(BadInput, match=r"set algorithm\.custom_loss"):
        loss.compute(batch, ForwardInputs(streams={}), NO_PREDICTION, None)


def test_a_loss_without_functions_stays_itself() -> None:
    loss = custom()
    assert with_functions(loss, {}) is loss


def test_functions_take_the_place_of_single_parts() -> None:
    batch = batch_of([make_pair()])
    whole = LossOutput(loss=torch.tensor(3.0), metrics={})
    loss = with_functions(custom(), {PREPARE: doubled})
    assert torch.equal(
        loss.prepare(batch, StepContext()).streams[VISUAL], 2 * batch.tensors[VISUAL]
    )
    assert (loss.needs, loss.unit) == (custom().needs, "sample")
    with pytest.raises(BadInput, match=r"set algorithm\.custom_loss"):
        loss.compute(batch, ForwardInputs(streams={}), NO_PREDICTION, None)
    both = with_functions(custom(), {PREPARE: doubled, FORMULA: constant(whole)})
    assert both.compute(batch, ForwardInputs(streams={}), NO_PREDICTION, None) is whole


@pytest.mark.parametrize(
    ("result", "words"),
    [
        (torch.tensor(1.0), r"drl\.api\.LossOutput, got Tensor"),
        (LossOutput(loss=torch.ones(3), metrics={}), r"one number.* shape \(3,\)"),
    ],
)
def test_a_formula_that_returns_something_else_is_refused(result: Any, words: str) -> None:
    loss = FunctionLoss(custom(), None, constant(result))
    with pytest.raises(BadInput, match=rf"algorithm\.custom_loss must return .*{words}"):
        loss.compute(batch_of([make_pair()]), ForwardInputs(streams={}), NO_PREDICTION, None)


def test_inputs_of_another_kind_are_refused() -> None:
    loss = FunctionLoss(custom(), lambda pairs, context: {"latents": 1}, None)
    with pytest.raises(BadInput, match=r"custom_prepare must return drl\.api\.ForwardInputs"):
        loss.prepare(batch_of([make_pair()]), StepContext())


def test_a_wrapped_loss_still_recomputes() -> None:
    loss = custom()
    loss.recomputes_old_log_prob = True
    loss.ratio_width = 0.5
    assert FunctionLoss(loss, doubled, None).recomputes_old_log_prob
    assert FunctionLoss(loss, doubled, None).ratio_width == 0.5
    assert (
        FunctionLoss(loss, None, doubled).ratio_width is None
    )  # another formula clips as it likes

"""Evaluations: when they happen, which noise they use, what they add up."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest

from drl.interfaces.steps import StepChoice, StepRequest, StepStrategy
from drl.stages.evaluate import (
    AFTER,
    BEFORE,
    EvaluationSet,
    evaluate,
    evaluate_before_training,
    evaluate_if_due,
    evaluation_requests,
    evaluation_rows,
    mean_reward,
)
from drl.stages.residence import Residence
from drl.stages.rollout import evaluation_sampling, training_sampling
from drl.testing import make_prompt, make_sample
from drl.types import Context, EvaluationReport


def recipe(*, sampler: bool = False, count: int = 1, **evaluation: Any) -> Any:
    chosen = {
        "interval": None,
        "before_train": True,
        "after_train": True,
        "num_steps": 6,
        "n_samples_per_prompt": count,
        "seed": 42,
        "rollout_sampler": sampler,
    }
    return SimpleNamespace(
        eval=SimpleNamespace(**(chosen | evaluation)),
        train=SimpleNamespace(num_rollout=10),
        rollouts_per_epoch=None,
        sampling=SimpleNamespace(
            num_steps=8,
            height=16,
            width=16,
            num_frames=1,
            fps=None,
            flow_shift=None,
            guidance_scale=1.0,
            guidance_scale_2=None,
            true_cfg_scale=None,
            negative_prompt=None,
            generator_device="cpu",
        ),
        sde=SimpleNamespace(type="cps", noise_level=0.7, log_prob_no_const=True, num_steps=3),
    )


def run_of(given: Any, *, last: int = 9, first: int = 0) -> Any:
    """A run that only notes which evaluations are asked of it."""

    @contextmanager
    def phase(name: str) -> Iterator[None]:
        noted.append(name)
        yield

    noted: list[str] = []
    kept: list[tuple[str, EvaluationReport]] = []
    samples = {"words": [make_sample(reward=0.25), make_sample(reward=None)]}

    def do(work: Any) -> Mapping[str, Any]:
        work.close()
        return samples

    return SimpleNamespace(
        recipe=given,
        functions=SimpleNamespace(get=lambda option: None),
        first_rollout=first,
        ending=None,
        is_last=lambda rollout_id: rollout_id == last,
        evaluation_sets=(EvaluationSet(name="words", prompts=(make_prompt(),)),),
        engines=object(),
        residence=Residence(),
        phases=SimpleNamespace(phase=phase),
        background=SimpleNamespace(run=do),
        version=4,
        strategy=None,
        keep_evaluation=lambda report, label: kept.append((label, report)),
        hooks=SimpleNamespace(drl_evaluation_finished=lambda run, report: []),
        take_verdict=lambda verdict, done: None,
        kept=kept,
    )


def labels(run: Any) -> list[str]:
    return [label for label, _ in run.kept]


@pytest.mark.parametrize(
    ("interval", "after", "expected"),
    [
        (None, True, [AFTER]),
        (None, False, []),
        (0, False, []),
        (4, True, ["iteration-4", "iteration-8", AFTER]),
        (5, True, ["iteration-5", AFTER]),
        (5, False, ["iteration-5", "iteration-10"]),
        (11, False, []),
    ],
)
def test_evaluations_come_at_their_interval_and_once_at_the_end(
    interval: int | None, after: bool, expected: list[str]
) -> None:
    run = run_of(recipe(interval=interval, after_train=after))
    for rollout_id in range(10):
        evaluate_if_due(run, rollout_id)
    assert labels(run) == expected


@pytest.mark.parametrize(
    ("first", "before", "rollouts", "expected"),
    [
        (0, True, 10, [BEFORE]),
        (0, False, 10, []),
        (0, False, 0, [BEFORE]),
        (3, True, 10, []),
    ],
)
def test_untouched_weights_are_scored_once_and_never_after_a_resume(
    first: int, before: bool, rollouts: int, expected: list[str]
) -> None:
    given = recipe(before_train=before)
    given.train.num_rollout = rollouts
    run = run_of(given, first=first)
    evaluate_before_training(run)
    assert labels(run) == expected


def test_an_evaluation_without_sets_or_engine_is_none() -> None:
    without_sets, without_engine = run_of(recipe()), run_of(recipe())
    without_sets.evaluation_sets = ()
    without_engine.engines = None
    for run in (without_sets, without_engine):
        assert evaluate(run, 3, label="x") is None
        assert run.kept == []


def test_a_report_says_which_weights_were_scored_and_how_well() -> None:
    run = run_of(recipe())
    report = evaluate(run, 3, label="iteration-3")
    assert report is not None
    assert (report.rollout_id, report.version, report.means) == (3, 4, {"words": 0.25})
    assert run.kept == [("iteration-3", report)]


def prompts(count: int) -> EvaluationSet:
    rows = tuple(make_prompt(f"prompt {row}", row=row) for row in range(count))
    return EvaluationSet(name="words", prompts=rows)


def test_sample_j_of_every_prompt_has_the_same_noise() -> None:
    run = run_of(recipe(count=3, seed=100))
    asked = evaluation_requests(run, prompts(2), evaluation_sampling(run.recipe))
    assert [request.seeds for request in asked] == [(100,), (101,), (102,)] * 2
    assert [request.members for request in asked] == [(0,), (1,), (2,)] * 2
    assert [request.group_index for request in asked] == [0, 0, 0, 1, 1, 1]
    assert [request.prompt.row for request in asked] == [0, 0, 0, 1, 1, 1]
    for request in asked:
        assert (request.evaluation, request.sde_steps, request.kept_latents) == (True, (), ())
        assert (request.sampling.sde_type, request.sampling.noise_level) == ("ode", 0.0)
        assert request.sampling.num_steps == 6


def test_the_steps_of_an_evaluation_are_those_of_sampling_when_unset() -> None:
    assert evaluation_sampling(recipe(num_steps=None)).num_steps == 8


class BySeed(StepStrategy):
    """Chooses one step by the seed that it is given."""

    seen: list[StepRequest]

    def choose(self, request: StepRequest) -> StepChoice:
        self.seen.append(request)
        step = request.seed % request.num_steps
        return StepChoice(sde=(step,), kept=(step, step + 1))


def test_the_noisy_sampler_keeps_its_strategy_and_no_latents() -> None:
    run = run_of(recipe(count=2, seed=8))
    run.strategy = BySeed(None, Context())
    run.strategy.seen = []
    asked = evaluation_requests(run, prompts(2), training_sampling(run.recipe))
    assert [request.sde_steps for request in asked] == [(0,), (1,)] * 2
    assert {request.kept_latents for request in asked} == {()}
    assert {request.evaluation for request in asked} == {False}
    assert {request.sampling.sde_type for request in asked} == {"cps"}
    assert [(one.seed, one.group_index, one.rollout_id) for one in run.strategy.seen] == [
        (8, 0, 0),
        (9, 0, 0),
        (8, 1, 0),
        (9, 1, 0),
    ]


def test_without_a_strategy_the_first_steps_are_noisy() -> None:
    run = run_of(recipe())
    (request,) = evaluation_requests(run, prompts(1), training_sampling(run.recipe))
    assert request.sde_steps == (0, 1, 2)


def test_failed_samples_leave_the_mean_and_none_leaves_no_mean() -> None:
    samples = [make_sample(reward=value) for value in (0.25, None, 0.75, 0.0)]
    assert mean_reward(samples) == pytest.approx(1 / 3)
    assert math.isnan(mean_reward(samples[1:2]))
    assert math.isnan(mean_reward([]))


def test_rows_tell_what_was_asked_and_what_it_scored() -> None:
    sample = make_sample("żółw", member=1, seed=43, group_index=5, reward=0.5)
    failed = make_sample(reward=None)
    report = EvaluationReport(
        rollout_id=1, version=0, means={}, samples={"words": [sample], "words/noisy": [failed]}
    )
    first, second = evaluation_rows(report)
    assert first == {
        "set": "words",
        "row": 5,
        "prompt": "żółw",
        "member": 1,
        "seed": 43,
        "reward": 0.5,
    }
    assert (second["set"], second["reward"]) == ("words/noisy", None)

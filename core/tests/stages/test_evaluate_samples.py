"""An evaluation from request to score: every prompt once, in order, whoever finishes first."""

from __future__ import annotations

import asyncio
from contextlib import nullcontext
from dataclasses import replace
from types import SimpleNamespace
from typing import Any
from weakref import ref

import pytest
from torch import Tensor

from drl.errors import BadInput, TrustError
from drl.stages.evaluate import AFTER, EvaluationSet, evaluate, evaluate_if_due
from drl.stages.residence import Residence
from drl.testing import make_prompt, make_sample
from drl.types import RolloutRequest, Sample, Score, Verdict

PROMPTS = tuple(make_prompt(f"prompt {row}", row=row) for row in range(3))


def recipe(*, sampler: bool, count: int, interval: int | None = None) -> Any:
    return SimpleNamespace(
        eval=SimpleNamespace(
            interval=interval,
            after_train=True,
            num_steps=4,
            n_samples_per_prompt=count,
            seed=42,
            rollout_sampler=sampler,
            reward_key=None,
        ),
        reward=SimpleNamespace(group=False),
        rollouts_per_epoch=None,
        sampling=SimpleNamespace(
            num_steps=4,
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
        sde=SimpleNamespace(type="cps", noise_level=0.7, log_prob_no_const=True, num_steps=2),
        trust=SimpleNamespace(settings=True),
    )


class Engines:
    """Makes what is asked; later requests are done earlier."""

    def __init__(self, change: Any = None) -> None:
        self.asked: list[RolloutRequest] = []
        self.change = change

    async def generate(self, request: RolloutRequest) -> list[Sample]:
        self.asked.append(request)
        for _ in range(20 - 2 * len(self.asked)):
            await asyncio.sleep(0)
        (seed,), (member,) = request.seeds, request.members
        sample = make_sample(
            request.prompt.text, group_index=request.group_index, member=member, seed=seed, index=99
        )
        sample.prompt, sample.version = request.prompt, 4
        if self.change is not None:
            self.change(sample)
        return [sample]


class Rewards:
    """Scores by prompt row and member; what has row 2 cannot be scored."""

    wants_groups = False

    def weights_of(self, sample: Sample) -> dict[str, float]:
        return {"words": 2.0}

    async def score(self, samples: list[Sample]) -> list[dict[str, Score]]:
        return [
            {
                "words": Score(
                    value=None if one.prompt.row == 2 else one.prompt.row + 0.25 * one.member
                )
            }
            for one in samples
        ]


def run_of(given: Any, *, engines: Any = None, verdicts: tuple[Verdict, ...] = ()) -> Any:
    told: list[Any] = []
    run = SimpleNamespace(
        recipe=given,
        functions=SimpleNamespace(get=lambda option: None),
        engines=engines or Engines(),
        residence=Residence(),
        rewards=Rewards(),
        family=SimpleNamespace(edit_request=lambda request: request),
        strategy=None,
        version=4,
        ending=None,
        saved=1,
        evaluation_sets=(EvaluationSet(name="words", prompts=PROMPTS),),
        phases=SimpleNamespace(phase=lambda name: nullcontext()),
        background=SimpleNamespace(run=asyncio.run),
        schedule=lambda sampling: None,
        is_last=lambda rollout_id: False,
        progress=lambda phase, done, total: told.append((phase, done, total)),
        keep_evaluation=lambda report, label: told.append((label, report)),
        hooks=SimpleNamespace(drl_evaluation_finished=lambda run, report: list(verdicts)),
        told=told,
    )

    def take(verdict: Verdict, done: int) -> None:
        told.append((verdict.action, done))
        if verdict.action == "stop":
            run.ending = verdict.reason

    run.take_verdict = take
    return run


def test_samples_and_scores_stay_in_the_order_of_the_requests() -> None:
    run = run_of(recipe(sampler=False, count=2))
    report = evaluate(run, 3, label="x")
    assert report is not None
    samples = report.samples["words"]
    assert [(one.prompt.row, one.member, one.seed) for one in samples] == [
        (row, member, 42 + member) for row in range(3) for member in range(2)
    ]
    assert [one.index for one in samples] == list(range(6))
    assert [one.reward for one in samples] == [0.0, 0.5, 2.0, 2.5, None, None]
    assert samples[3].scores == {"words": Score(value=1.25)}
    assert report.means == {"words": pytest.approx(1.25)}


@pytest.mark.parametrize("made_by", [None, "rollout.custom_generate"])
def test_no_condition_record_waits_for_the_scores(made_by: str | None) -> None:
    records: list[ref[Tensor]] = []
    alive: list[int] = []

    def watch(sample: Sample) -> None:
        assert sample.condition is not None
        assert sample.negative is not None
        for record in (sample.condition, sample.negative):
            records.extend(map(ref, record.tensors.values()))

    async def again(run: Any, request: Any, sampling: Any, *, evaluation: bool) -> list[Sample]:
        made: list[Sample] = await run.engines.generate(request)
        return made

    class Watching(Rewards):
        async def score(self, samples: list[Sample]) -> list[dict[str, Score]]:
            alive.append(sum(record() is not None for record in records))
            return await super().score(samples)

    run = run_of(recipe(sampler=True, count=2), engines=Engines(watch))
    run.functions.get = {made_by: again}.get
    run.rewards = Watching()
    report = evaluate(run, 3, label="x")
    assert report is not None
    assert len(records) == 24
    assert alive == [0, 0]
    made = [sample for samples in report.samples.values() for sample in samples]
    assert {(sample.condition, sample.negative) for sample in made} == {(None, None)}


def test_progress_counts_each_picture_once() -> None:
    run = run_of(recipe(sampler=False, count=1))
    evaluate(run, 3, label="x")
    assert run.told[:3] == [("eval words", n, 3) for n in (1, 2, 3)]


def test_the_rollouts_own_sampler_is_an_evaluation_of_its_own() -> None:
    run = run_of(recipe(sampler=True, count=1))
    report = evaluate(run, 3, label="x")
    assert report is not None
    assert list(report.means) == ["words", "words/rollout_sampler"]
    kinds = [request.sampling.sde_type for request in run.engines.asked]
    assert kinds == ["ode"] * 3 + ["cps"] * 3
    assert [request.evaluation for request in run.engines.asked] == [True] * 3 + [False] * 3
    plain = run_of(recipe(sampler=False, count=1))
    evaluate(plain, 3, label="x")
    assert {request.sampling.sde_type for request in plain.engines.asked} == {"ode"}


def other_seed(sample: Sample) -> None:
    sample.seed += 1


def other_weights(sample: Sample) -> None:
    sample.version = 3


@pytest.mark.parametrize(
    ("change", "said"), [(other_seed, "asked for seed 42, got 43"), (other_weights, "version 3")]
)
def test_a_held_out_sample_must_be_what_was_asked_for_too(change: Any, said: str) -> None:
    run = run_of(recipe(sampler=False, count=1), engines=Engines(change))
    with pytest.raises(TrustError, match=said):
        evaluate(run, 3, label="x")
    assert not [one for one in run.told if one[0] == "x"]


def test_a_family_may_edit_the_request_and_the_sample_is_held_against_the_recipe() -> None:
    run = run_of(recipe(sampler=False, count=1))
    run.family.edit_request = lambda request: replace(request, debug=True)
    evaluate(run, 3, label="x")
    assert {request.debug for request in run.engines.asked} == {True}


def test_every_verdict_is_taken_after_the_report_is_kept() -> None:
    verdicts = (Verdict("keep", "best"), Verdict("keep", "second opinion"))
    run = run_of(recipe(sampler=False, count=1), verdicts=verdicts)
    evaluate(run, 3, label="iteration-3")
    assert [one[0] for one in run.told[3:]] == ["iteration-3", "keep", "keep"]
    assert run.told[-1] == ("keep", 3)


@pytest.mark.parametrize("after", [True, False])
def test_a_verdict_that_stops_the_run_makes_this_evaluation_the_last(after: bool) -> None:
    given = recipe(sampler=False, count=1, interval=2)
    given.eval.after_train = after
    run = run_of(given, verdicts=(Verdict("stop", "good enough"),))
    evaluate_if_due(run, 1)  # iteration 1 is saved already
    labels = [label for label, *rest in run.told if rest and not isinstance(rest[0], int)]
    assert labels == (["iteration-2", AFTER] if after else ["iteration-2"])
    reports = [rest[0] for label, *rest in run.told if label in labels]
    assert all(report is reports[0] for report in reports)


def test_a_set_may_have_its_own_number_of_samples() -> None:
    run = run_of(recipe(sampler=False, count=1))
    run.evaluation_sets = (EvaluationSet(name="few", prompts=PROMPTS[:1], samples_per_prompt=3),)
    report = evaluate(run, 3, label="x")
    assert report is not None
    assert [one.seed for one in report.samples["few"]] == [42, 43, 44]


@pytest.mark.parametrize(("group", "sizes"), [(False, [6]), (True, [2, 2, 2])])
def test_held_out_samples_are_scored_together_or_prompt_by_prompt(
    group: bool, sizes: list[int]
) -> None:
    class Counting(Rewards):
        sizes: list[int] = []  # noqa: RUF012

        async def score(self, samples: list[Sample]) -> list[dict[str, Score]]:
            self.sizes.append(len(samples))
            return await super().score(samples)

    run = run_of(recipe(sampler=False, count=2))
    run.recipe.reward.group = group
    run.rewards = Counting()
    Counting.sizes.clear()
    report = evaluate(run, 3, label="x")
    assert report is not None
    assert Counting.sizes == sizes
    assert [one.reward for one in report.samples["words"]] == [0.0, 0.5, 2.0, 2.5, None, None]


def test_the_evaluation_has_its_own_part_of_the_score() -> None:
    class Parted(Rewards):
        async def score(self, samples: list[Sample]) -> list[dict[str, Score]]:
            parts = {"colour": 0.125, "shape": 0.25}
            return [{"words": Score(value=1.0, parts=parts)} for _ in samples]

    run = run_of(recipe(sampler=False, count=1))
    run.rewards = Parted()
    run.recipe.eval.reward_key = "shape"
    report = evaluate(run, 3, label="x")
    assert report is not None
    assert report.means == {"words": 0.5}  # weight 2
    run.recipe.eval.reward_key = "size"
    with pytest.raises(BadInput, match="no part 'size'; its parts: 'colour', 'shape'"):
        evaluate(run, 3, label="x")


def test_samples_of_an_evaluation_may_be_made_by_a_function() -> None:
    async def again(run: Any, request: Any, sampling: Any, *, evaluation: bool) -> list[Sample]:
        run.told.append(("evaluation", evaluation))
        return await run.engines.generate(request)

    run = run_of(recipe(sampler=False, count=1))
    run.functions.get = {"rollout.custom_generate": again}.get
    evaluate(run, 3, label="x")
    assert run.told.count(("evaluation", True)) == 3


@pytest.mark.parametrize("suppress", [True, False, None])
def test_a_function_sees_an_evaluation_first_and_may_leave_it_out_of_the_log(
    suppress: bool | None,
) -> None:
    def log(done: int, run: Any, data: Any, extra: dict[str, float]) -> bool | None:
        extra["eval/best"] = max(one.reward or 0.0 for one in data["words"])
        return suppress

    run = run_of(recipe(sampler=False, count=1))
    run.functions.get = {"rollout.custom_eval_log": log}.get
    report = evaluate(run, 3, label="x")
    assert report is not None
    assert report.metrics == {"eval/best": 2.0}
    assert report.logged is (suppress is not True)

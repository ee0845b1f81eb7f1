"""Held-out scores: the same prompts and noises every time, under the deterministic sampler.

The rollout's own noisy sampler can be evaluated beside it (``eval.rollout_sampler``): a gain under
one sampler is no gain under the other.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from drl.interfaces.steps import StepRequest
from drl.mathematics.seeding import evaluation_seed
from drl.stages.rollout import choose_steps, evaluation_sampling, training_sampling
from drl.stages.save import save_unless_saved
from drl.stages.together import together
from drl.stages.trust import check_samples
from drl.types import EvaluationReport, Prompt, RolloutRequest, Sample, Sampling

if TYPE_CHECKING:
    from drl.run import Run

NOISY = "rollout_sampler"
BEFORE, AFTER = "before", "after"


@dataclass(frozen=True, slots=True, kw_only=True)
class EvaluationSet:
    """A named list of held-out prompts."""

    name: str
    prompts: tuple[Prompt, ...]


def evaluate_before_training(run: Run) -> None:
    """Evaluate the untouched weights at the very start; all that a run of 0 iterations does."""
    if run.first_rollout == 0 and (
        run.recipe.eval.before_train or not run.recipe.train.num_rollout
    ):
        evaluate(run, 0, label=BEFORE)


def evaluate_if_due(run: Run, rollout_id: int) -> None:
    """Evaluate every ``eval.interval`` iterations, and after the last one."""
    done = rollout_id + 1
    interval, after_train = run.recipe.eval.interval, run.recipe.eval.after_train
    if run.is_last(rollout_id) and after_train:
        evaluate(run, done, label=AFTER)
    elif interval and done % interval == 0:
        report = evaluate(run, done, label=f"iteration-{done}")
        if run.ending:  # its verdict made this iteration the last one
            save_unless_saved(run, rollout_id)
            if after_train and report is not None:
                run.keep_evaluation(report, AFTER)


def evaluate(run: Run, done: int, *, label: str) -> EvaluationReport | None:
    """Evaluate every set under every sampler, log the means, keep rows and pictures."""
    if not run.evaluation_sets or run.engines is None:
        return None
    with run.phases.phase("eval"):
        samples = run.background.run(_evaluate(run))
    means = {name: mean_reward(column) for name, column in samples.items()}
    report = EvaluationReport(rollout_id=done, version=run.version, means=means, samples=samples)
    run.keep_evaluation(report, label)
    for verdict in run.hooks.drl_evaluation_finished(run=run, report=report):
        run.take_verdict(verdict, done)
    return report


async def _evaluate(run: Run) -> dict[str, list[Sample]]:
    samplers = {"": evaluation_sampling(run.recipe)}
    if run.recipe.eval.rollout_sampler:
        samplers[f"/{NOISY}"] = training_sampling(run.recipe)
    results: dict[str, list[Sample]] = {}
    for data in run.evaluation_sets:
        for suffix, sampling in samplers.items():
            requests = evaluation_requests(run, data, sampling)
            results[data.name + suffix] = await _score_all(run, requests, data.name + suffix)
    return results


def evaluation_requests(run: Run, data: EvaluationSet, sampling: Sampling) -> list[RolloutRequest]:
    """Return one request per sample; sample j of every prompt has the seed ``eval.seed + j``."""
    requests = []
    noisy = sampling.sde_type != "ode"
    for place, prompt in enumerate(data.prompts):
        for member in range(run.recipe.eval.n_samples_per_prompt):
            seed = evaluation_seed(run.recipe.eval.seed, member)
            step = StepRequest(
                num_steps=sampling.num_steps, seed=seed, group_index=place, rollout_id=0
            )
            requests.append(
                RolloutRequest(
                    prompt=prompt,
                    group_index=place,
                    members=(member,),
                    seeds=(seed,),
                    sampling=sampling,
                    sde_steps=_noisy_steps(run, step) if noisy else (),
                    kept_latents=(),
                    evaluation=not noisy,
                )
            )
    return requests


def _noisy_steps(run: Run, step: StepRequest) -> tuple[int, ...] | None:
    return choose_steps(run.strategy, step, run.recipe.sde.num_steps).sde


async def _score_all(run: Run, requests: Sequence[RolloutRequest], name: str) -> list[Sample]:
    """Generate and score in flight; every prompt counts exactly once."""
    finished = 0

    async def one(number: int, request: RolloutRequest) -> Sample:
        nonlocal finished
        assert run.engines is not None
        (sample,) = await run.engines.generate(run.family.edit_request(request))
        check_samples(run, request, [sample])
        sample.index = number
        finished += 1
        run.progress(f"eval {name}", finished, len(requests))
        return sample

    samples = await together(one(n, request) for n, request in enumerate(requests))
    scores = await run.rewards.score(samples)
    for sample, terms in zip(samples, scores, strict=True):
        sample.scores = terms
        sample.reward = run.reward_of(terms)
    return samples


def mean_reward(samples: Sequence[Sample]) -> float:
    """Return the mean over samples with a reward; NaN when there is none."""
    values = [sample.reward for sample in samples if sample.reward is not None]
    return sum(values) / len(values) if values else float("nan")


def evaluation_rows(report: EvaluationReport) -> list[dict[str, Any]]:
    """Return one plain row per sample: what was asked, with which seed, what it scored."""
    return [
        {
            "set": name,
            "row": sample.prompt.row,
            "prompt": sample.prompt.text,
            "member": sample.member,
            "seed": sample.seed,
            "reward": sample.reward,
        }
        for name, samples in report.samples.items()
        for sample in samples
    ]

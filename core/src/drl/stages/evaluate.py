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
from drl.stages.generate import generate
from drl.stages.own_function import function_evaluation
from drl.stages.periodic import due
from drl.stages.residence import for_sampling
from drl.stages.reward import assign_rewards, scores_groups, scores_of
from drl.stages.rollout import choose_steps, evaluation_sampling, training_sampling
from drl.stages.rollout_figures import log_evaluation
from drl.stages.save import save_unless_saved
from drl.stages.together import together
from drl.types import EvaluationReport, Prompt, RolloutRequest, Sample, Sampling

if TYPE_CHECKING:
    from drl.run import Run

NOISY = "rollout_sampler"
BEFORE, AFTER = "before", "after"


@dataclass(frozen=True, slots=True, kw_only=True)
class EvaluationSet:
    """A named list of held-out prompts; ``samples_per_prompt`` None: ``eval.n_samples_per_prompt``."""

    name: str
    prompts: tuple[Prompt, ...]
    samples_per_prompt: int | None = None


def evaluate_before_training(run: Run) -> None:
    """Evaluate the untouched weights at the very start; all that a run of 0 iterations does."""
    if not run.recipe.train.num_rollout:
        evaluate(run, 0, label=BEFORE)  # whatever checkpoint.load brought
    elif run.first_rollout == 0 and run.recipe.eval.before_train:
        evaluate(run, 0, label=BEFORE)


def evaluate_if_due(run: Run, rollout_id: int) -> None:
    """Evaluate every ``eval.interval`` iterations, and after the last one."""
    done = rollout_id + 1
    after_train = run.recipe.eval.after_train
    if run.is_last(rollout_id) and after_train:
        evaluate(run, done, label=AFTER)
    elif due(run.recipe, done, run.recipe.eval.interval):
        report = evaluate(run, done, label=f"iteration-{done}")
        if run.ending:  # its verdict made this iteration the last one
            save_unless_saved(run, rollout_id)
            if after_train and report is not None:
                run.keep_evaluation(report, AFTER)


def evaluate(run: Run, done: int, *, label: str) -> EvaluationReport | None:
    """Evaluate every set under every sampler, log the means, keep rows and pictures."""
    own = run.functions.get("eval.function")
    if run.engines is None or not (run.evaluation_sets or own is not None):
        return None
    for_sampling(run)
    with run.phases.phase("eval"):
        samples = evaluation_samples(run, done)
    means = {name: mean_reward(column) for name, column in samples.items()}
    metrics, logged = log_evaluation(run, done, samples)
    report = EvaluationReport(
        rollout_id=done,
        version=run.version,
        means=means,
        samples=samples,
        metrics=metrics,
        logged=logged,
    )
    run.keep_evaluation(report, label)
    for verdict in run.hooks.drl_evaluation_finished(run=run, report=report):
        run.take_verdict(verdict, done)
    return report


def evaluation_samples(run: Run, done: int) -> dict[str, list[Sample]]:
    """Return scored samples by set: made by ``eval.function``, else ``rollout.function``, else drl."""
    for option in ("eval.function", "rollout.function"):
        function = run.functions.get(option)
        if function is not None:
            return function_evaluation(run, done, option, function)
    return own_evaluation(run)


def own_evaluation(run: Run) -> dict[str, list[Sample]]:
    """Return drl's own evaluation: every set under every sampler."""
    return run.background.run(_evaluate(run))


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
        for member in range(data.samples_per_prompt or run.recipe.eval.n_samples_per_prompt):
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
    """Generate all samples and score them, without condition records; every prompt counts exactly once."""
    finished = 0

    async def one(number: int, request: RolloutRequest) -> Sample:
        nonlocal finished
        (sample,) = await generate(run, request, evaluation=True)
        sample.index = number
        # nothing trains on it: with those of all prompts an engine's device would fill up
        sample.condition = sample.negative = None
        finished += 1
        run.progress(f"eval {name}", finished, len(requests))
        return sample

    samples = await together(one(n, request) for n, request in enumerate(requests))
    parts = by_group(samples) if scores_groups(run) else [samples]
    scores = [row for part in await together(scores_of(run, p) for p in parts) for row in part]
    assign_rewards(
        samples, scores, run.rewards.weights_of, on_failure="mask", key=run.recipe.eval.reward_key
    )
    return samples


def by_group(samples: Sequence[Sample]) -> list[list[Sample]]:
    """Return the samples of one prompt together, in order."""
    groups: dict[int, list[Sample]] = {}
    for sample in samples:
        groups.setdefault(sample.group_index, []).append(sample)
    return list(groups.values())


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

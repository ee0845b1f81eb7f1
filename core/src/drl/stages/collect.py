"""Collect one rollout: draw prompts, generate, score each microgroup as it returns, filter, redraw."""

from __future__ import annotations

import asyncio
import time
from collections import Counter, defaultdict
from dataclasses import dataclass
from typing import TYPE_CHECKING

from drl.errors import BadInput
from drl.stages.reward import assign_rewards, require_some
from drl.stages.rollout import group_requests, training_sampling
from drl.stages.together import end_tasks, together
from drl.stages.trust import check_echoes, check_samples
from drl.types import Group, Prompt, Rollout, RolloutRequest, Sample

if TYPE_CHECKING:
    from drl.run import Run


@dataclass(slots=True)
class Busy:
    """Wall time during which at least one call of a kind was in flight; many at once count once."""

    in_flight: int = 0
    since: float = 0.0
    seconds: float = 0.0

    def __enter__(self) -> None:
        if self.in_flight == 0:
            self.since = time.perf_counter()
        self.in_flight += 1

    def __exit__(self, *error: object) -> None:
        self.in_flight -= 1
        if self.in_flight == 0:
            self.seconds += time.perf_counter() - self.since


Seconds = defaultdict[str, Busy]


def collect(run: Run, rollout_id: int) -> Rollout:
    """Return the groups of one iteration, sorted by id, each scored and allowed by every filter."""
    rollout = run.background.run(_collect(run, rollout_id))
    require_some(rollout.samples, rollout_id)
    run.counters.images_seen += len(rollout.samples)
    run.hooks.drl_rollout_finished(run=run, rollout=rollout)
    return rollout


async def _collect(run: Run, rollout_id: int) -> Rollout:
    wanted = run.recipe.rollout.batch_size
    allowed = wanted * run.recipe.rollout.max_draws
    drawn, kept, dropped = wanted, [], Counter[str]()
    seconds: Seconds = defaultdict(Busy)
    pending = {start_group(run, prompt, rollout_id, seconds) for prompt in run.source.take(wanted)}
    try:
        while pending:
            done, pending = await asyncio.wait(pending, return_when=asyncio.FIRST_COMPLETED)
            for group in await together(done):
                reasons = [r for r in run.hooks.drl_filter_group(run=run, group=group) if r]
                if not reasons:
                    kept.append(group)
                    continue
                dropped[reasons[0].reason] += 1
                drawn += 1
                if drawn > allowed:
                    raise BadInput(_too_many_draws(run, dropped, drawn - 1))
                (prompt,) = run.source.take(1)
                pending.add(start_group(run, prompt, rollout_id, seconds))
            run.progress("rollout", len(kept), wanted)
    finally:
        await end_tasks(pending)
    kept.sort(key=lambda group: group.group_index)
    return Rollout(
        rollout_id=rollout_id,
        version=run.version,
        groups=kept,
        dropped=dict(dropped),
        seconds={name: busy.seconds for name, busy in seconds.items()},
    )


def start_group(run: Run, prompt: Prompt, rollout_id: int, seconds: Seconds) -> asyncio.Task[Group]:
    """Give a prompt the next group number and start generating it."""
    group_index = run.counters.next_group
    run.counters.next_group += 1
    requests = group_requests(
        run.recipe, training_sampling(run.recipe), run.strategy, prompt, group_index, rollout_id
    )
    return asyncio.create_task(_finish_group(run, requests, seconds))


async def _finish_group(run: Run, requests: list[RolloutRequest], seconds: Seconds) -> Group:
    parts = await together(generate_scored(run, r, seconds) for r in requests)
    samples = [sample for part in parts for sample in part]
    if run.rewards.wants_groups:
        await score(run, samples, seconds)
    return Group(group_index=requests[0].group_index, prompt=requests[0].prompt, samples=samples)


async def generate_scored(run: Run, request: RolloutRequest, seconds: Seconds) -> list[Sample]:
    """Generate one microgroup, check it against its request, and score it unless groups are scored."""
    assert run.engines is not None
    with seconds["generate"]:
        samples = await run.engines.generate(run.family.edit_request(request))
    check_samples(run, request, samples)
    if run.recipe.trust.settings:
        check_echoes(run.engines.engine.capabilities().echoes, samples)
    count = run.recipe.rollout.n_samples_per_prompt
    for sample, member in zip(samples, request.members, strict=True):
        sample.index = request.group_index * count + member
    if not run.rewards.wants_groups:
        await score(run, samples, seconds)
    return samples


async def score(run: Run, samples: list[Sample], seconds: Seconds) -> None:
    """Score samples and set their rewards."""
    with seconds["reward"]:
        scores = await run.rewards.score(samples)
    assign_rewards(samples, scores, run.rewards.weights, on_failure=run.recipe.reward.on_failure)


def _too_many_draws(run: Run, dropped: Counter[str], drawn: int) -> str:
    wanted = run.recipe.rollout.batch_size
    return (
        f"rollout.max_draws: {drawn} groups were drawn for a batch of {wanted} and filters dropped "
        f"{dict(dropped)}\nraise rollout.max_draws (now {run.recipe.rollout.max_draws}), or loosen the filter"
    )

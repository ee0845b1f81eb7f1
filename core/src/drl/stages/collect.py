"""Collect one rollout: draw prompts, generate, score each microgroup as it returns, filter, redraw."""

from __future__ import annotations

import asyncio
import time
from collections import Counter, defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from drl.errors import BadInput, ContractError
from drl.stages.filters import filter_samples, verdict
from drl.stages.generate import generate
from drl.stages.own_function import function_rollout
from drl.stages.reward import assign_rewards, require_some, scores_groups, scores_of
from drl.stages.rollout import group_requests, training_sampling
from drl.stages.rollout_figures import log_rollout
from drl.stages.together import end_tasks, together
from drl.types import Group, Prompt, Rollout, RolloutRequest, Sample

if TYPE_CHECKING:
    from drl.interfaces.data import DataSource
    from drl.run import Run


@dataclass(slots=True)
class Busy:
    """Wall time during which at least one call of a kind was in flight; many at once count once."""

    in_flight: int = 0
    since: float = 0.0
    seconds: float = 0.0
    spans: list[tuple[float, float]] = field(default_factory=list)

    def __enter__(self) -> None:
        if self.in_flight == 0:
            self.since = time.perf_counter()
        self.in_flight += 1

    def __exit__(self, *error: object) -> None:
        self.in_flight -= 1
        if self.in_flight == 0:
            now = time.perf_counter()
            self.seconds += now - self.since
            self.spans.append((self.since, now))


Seconds = defaultdict[str, Busy]


def collect(run: Run, rollout_id: int) -> Rollout:
    """Return the groups of one iteration, sorted by id, each scored and allowed by every filter."""
    began = time.perf_counter()
    function = run.functions.get("rollout.function")
    if function is None:
        rollout = own_rollout(run, rollout_id, run.source)
    else:
        rollout = function_rollout(run, rollout_id, function)
    filter_samples(run, rollout)
    require_some(rollout.samples, rollout_id)
    run.counters.images_seen += len(rollout.samples)
    run.hooks.drl_rollout_finished(run=run, rollout=rollout)
    log_rollout(run, rollout, time.perf_counter() - began)
    return rollout


def own_rollout(run: Run, rollout_id: int, data_source: DataSource) -> Rollout:
    """Return drl's own rollout of prompts from a data source; a ``rollout.function`` may call it."""
    return run.background.run(_collect(run, rollout_id, data_source))


@dataclass(slots=True)
class Draws:
    """How many groups were drawn, kept and dropped, and how many more are needed.

    The first ``wanted`` groups by number that pass every filter are the rollout. Each draw depends only on
    how many of the groups drawn so far pass, so neither the draws nor the choice depend on who is done
    first; that is why surplus groups are waited for and not cancelled.
    """

    wanted: int
    at_once: int | None
    allowed: int
    drawn: int = 0
    kept: list[Group] = field(default_factory=list)
    dropped: Counter[str] = field(default_factory=Counter)

    @property
    def missing(self) -> int:
        """Groups that cannot come any more from what was drawn: the ones to draw now."""
        possible = self.drawn - self.dropped.total()
        return max(0, self.wanted - possible)

    def next(self) -> int:
        """Return the number of prompts to draw now, and count them as drawn."""
        count = 0 if self.missing == 0 else max(self.missing, self.at_once or 0)
        if self.drawn + count > self.allowed:
            return 0
        self.drawn += count
        return count

    def split(self) -> tuple[list[Group], list[Group]]:
        """Return the groups of the rollout, sorted by number, and those beyond the target."""
        self.kept.sort(key=lambda group: group.group_index)
        return self.kept[: self.wanted], self.kept[self.wanted :]


def draws_of(run: Run) -> Draws:
    """Return the draws that the recipe allows, none made yet."""
    section = run.recipe.rollout
    at_once = section.over_sampling_batch_size
    allowed = section.max_draws * max(section.batch_size, at_once or 0)
    return Draws(wanted=section.batch_size, at_once=at_once, allowed=allowed)


async def _collect(run: Run, rollout_id: int, source: DataSource) -> Rollout:
    draws, pending = draws_of(run), set[asyncio.Task[Group]]()
    seconds: Seconds = defaultdict(Busy)
    try:
        while True:
            for prompt in drawn_prompts(source, draws.next()):
                pending.add(start_group(run, prompt, rollout_id, seconds))
            if not pending:
                break
            done, pending = await asyncio.wait(pending, return_when=asyncio.FIRST_COMPLETED)
            take_groups(run, draws, await together(done))
            run.progress("rollout", min(len(draws.kept), draws.wanted), draws.wanted)
    finally:
        await end_tasks(pending)
    if draws.missing:
        raise BadInput(_too_many_draws(run, draws))
    groups, surplus = draws.split()
    if surplus and run.recipe.rollout.buffer_filter is not None:
        source.give_back(surplus)
    return Rollout(
        rollout_id=rollout_id,
        version=run.version,
        groups=groups,
        dropped=dict(draws.dropped),
        seconds={name: busy.seconds for name, busy in seconds.items()},
        spans={name: busy.spans for name, busy in seconds.items()},
        metrics={"rollout/surplus_groups": float(len(surplus))} if surplus else {},
    )


def drawn_prompts(source: DataSource, count: int) -> list[Prompt]:
    """Take prompts; ContractError when the source gives another number: a rollout would never fill."""
    prompts = source.take(count) if count else []
    if len(prompts) != count:
        raise ContractError(
            f"data source {type(source).__name__} was asked for {count} prompts and gave {len(prompts)}; "
            "a source wraps into its next epoch"
        )
    return prompts


def take_groups(run: Run, draws: Draws, groups: Iterable[Group]) -> None:
    """Keep or drop groups that are complete."""
    for group in groups:
        dropped = verdict(run, group)
        if dropped is None:
            draws.kept.append(group)
        else:
            draws.dropped[dropped.reason] += 1


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
    if scores_groups(run):
        await score(run, samples, seconds)
    return Group(group_index=requests[0].group_index, prompt=requests[0].prompt, samples=samples)


async def generate_scored(run: Run, request: RolloutRequest, seconds: Seconds) -> list[Sample]:
    """Generate one microgroup and number its samples; score it unless groups are scored."""
    with seconds["generate"]:
        samples = await generate(run, request)
    count = run.recipe.rollout.n_samples_per_prompt
    for sample, member in zip(samples, request.members, strict=True):
        sample.index = request.group_index * count + member
    if not scores_groups(run):
        await score(run, samples, seconds)
    return samples


async def score(run: Run, samples: list[Sample], seconds: Seconds) -> None:
    """Score samples and set their rewards."""
    section = run.recipe.reward
    with seconds["reward"]:
        scores = await scores_of(run, samples)
    assign_rewards(
        samples, scores, run.rewards.weights_of, on_failure=section.on_failure, key=section.key
    )


def _too_many_draws(run: Run, draws: Draws) -> str:
    return (
        f"rollout.max_draws: {draws.drawn} groups were drawn for a batch of {draws.wanted} and filters "
        f"dropped {dict(draws.dropped)}\nraise rollout.max_draws (now {run.recipe.rollout.max_draws}), "
        "or loosen the filter"
    )

"""Units to pairs to shards, and their arithmetic (the knobs themselves are ``drl.config.batch``'s).

``train.global_batch_size`` counts samples, ``train.micro_batch_size`` counts pairs. Units never part
across optimizer windows. What does not fill a micro-batch is filled up with copies of weight 0, so
every forward has the same shape and every rank the same number of micro-batches.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from drl.config.batch import batch_knobs
from drl.config.steps import share_of_steps
from drl.errors import BatchError
from drl.types import Advantages, Pair, Rollout, Sample, Shard, StepContext

if TYPE_CHECKING:
    from drl.interfaces.loss import Loss
    from drl.run import Run

Unit = list[Pair]


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchPlan:
    """The batch arithmetic of one rollout, level by level."""

    prompts: int
    samples_per_prompt: int
    optimizer_steps: int
    samples_per_step: int
    pairs_per_sample: int
    micro_batch_size: int
    ranks: int = 1

    @property
    def samples(self) -> int:
        """Samples of one rollout."""
        return self.prompts * self.samples_per_prompt

    @property
    def pairs_per_step(self) -> int:
        """Pairs of one optimizer step, over all ranks."""
        return self.samples_per_step * self.pairs_per_sample

    @property
    def micro_batches(self) -> int:
        """Micro-batches of one optimizer step on each rank."""
        on_one_rank = -(-self.samples_per_step // self.ranks) * self.pairs_per_sample
        return -(-on_one_rank // self.micro_batch_size)

    @property
    def filler(self) -> int:
        """Rows of weight 0 that fill up the micro-batches of one optimizer step."""
        return self.micro_batches * self.micro_batch_size * self.ranks - self.pairs_per_step

    def lines(self) -> list[str]:
        """Render the plan for a person."""
        filler = f", {self.filler} rows of filler" if self.filler else ""
        return [
            f"{self.prompts} prompts x {self.samples_per_prompt} samples = {self.samples} samples a rollout",
            f"{self.optimizer_steps} optimizer step(s) of {self.samples_per_step} samples "
            f"x {self.pairs_per_sample} trained steps = {self.pairs_per_step} pairs each",
            f"{self.micro_batches} micro-batches of {self.micro_batch_size} pairs on each of "
            f"{self.ranks} rank(s){filler}",
        ]


def batch_plan(recipe: Any) -> BatchPlan:
    """Derive the plan of a recipe; raises BatchError when knobs contradict each other (B3, B4)."""
    prompts, count = recipe.rollout.batch_size, recipe.rollout.n_samples_per_prompt
    per_step, steps = batch_knobs(
        prompts * count, recipe.train.global_batch_size, recipe.train.num_steps_per_rollout
    )
    return BatchPlan(
        prompts=prompts,
        samples_per_prompt=count,
        optimizer_steps=steps,
        samples_per_step=per_step,
        pairs_per_sample=_pairs_per_sample(recipe),
        micro_batch_size=recipe.train.micro_batch_size,
        ranks=rank_count(recipe),
    )


def rank_count(recipe: Any) -> int:
    """Return the number of ranks of the trainer; each trains on its own shard."""
    count: int = recipe.cluster.actor_num_nodes * recipe.cluster.actor_num_gpus_per_node
    return count


def _pairs_per_sample(recipe: Any) -> int:
    if recipe.train.train_only:
        return 1
    total: int = recipe.sampling.num_steps
    if recipe.step_share is not None:
        return share_of_steps(total, recipe.step_share)
    return total if recipe.sde.step_strategy == "all" else min(recipe.sde.num_steps, total)


def make_shards(run: Run, rollout: Rollout, advantages: Advantages | None) -> list[Shard]:
    """Return one shard per data-parallel rank for a whole rollout."""
    context = run.step_context(rollout.rollout_id)
    units = expand_units(run.loss, rollout.samples, advantages, context)
    units = [[route_pair(run, pair) for pair in unit] for unit in units]
    _, steps = batch_knobs(
        len(rollout.samples),
        run.recipe.train.global_batch_size,
        run.recipe.train.num_steps_per_rollout,
    )
    return build_shards(
        units,
        steps=steps,
        micro_batch_size=run.recipe.train.micro_batch_size,
        ranks=run.ranks,
        rollout_id=rollout.rollout_id,
    )


def route_pair(run: Run, pair: Pair) -> Pair:
    """Name the component that predicts at the pair's timestep."""
    if pair.timestep is None:
        return pair
    component = run.family.route(pair.timestep).component
    return pair if component == pair.component else replace(pair, component=component)


def expand_units(
    loss: Loss,
    samples: Sequence[Sample],
    advantages: Advantages | None,
    context: StepContext,
) -> list[Unit]:
    """Let the loss turn each unit into pairs; raises BatchError when no pair came out."""
    values = None if advantages is None else advantages.values.tolist()
    units = []
    for start, end in unit_spans(loss.unit, samples):
        part = None if values is None else values[start:end]
        units.append(loss.expand(samples[start:end], part, context))
    if not any(units):
        raise BatchError("the rollout produced no pairs: set sde.num_steps or sde.step_strategy")
    return units


def unit_spans(unit: str, samples: Sequence[Sample]) -> list[tuple[int, int]]:
    """Return the sample ranges that are one unit: each sample, or each group."""
    if unit != "group":
        return [(place, place + 1) for place in range(len(samples))]
    starts = [
        place
        for place, sample in enumerate(samples)
        if place == 0 or sample.group_index != samples[place - 1].group_index
    ]
    return list(zip(starts, [*starts[1:], len(samples)], strict=True))


def build_shards(
    units: Sequence[Unit], *, steps: int, micro_batch_size: int, ranks: int, rollout_id: int
) -> list[Shard]:
    """Split units into windows, windows over ranks, ranks into filled micro-batches.

    Contiguous split: a micro-batch can repeat an engine's batch row by row.
    """
    per_step = split_evenly(units, steps)
    weights = [sum(pair.weight for unit in window for pair in unit) for window in per_step]
    per_rank: list[list[list[tuple[Pair, ...]]]] = [[] for _ in range(ranks)]
    for window in per_step:
        rows = [[pair for unit in part for pair in unit] for part in split_evenly(window, ranks)]
        filler = next(pair for unit in window for pair in unit)
        count = max(-(-len(part) // micro_batch_size) for part in rows)
        for rank, part in enumerate(rows):
            per_rank[rank].append(fill(part, filler, count, micro_batch_size))
    check_aligned(per_rank)
    return [
        Shard(rollout_id=rollout_id, windows=windows, window_weights=weights)
        for windows in per_rank
    ]


def check_aligned(per_rank: Sequence[Sequence[Sequence[tuple[Pair, ...]]]]) -> None:
    """Raise BatchError (B13) unless all ranks run the same component at the same time.

    Each forward gathers weights from all ranks: ranks in different components would wait for ever.
    """
    for window, parts in enumerate(zip(*per_rank, strict=True)):
        for number, batches in enumerate(zip(*parts, strict=True)):
            components = [batch[0].component for batch in batches]
            if len(set(components)) > 1:
                raise BatchError(
                    f"B13: in micro-batch {number} of optimizer step {window} the ranks need different "
                    f"components: {components}; choose trained steps of one phase, or the same steps for "
                    "every sample (sde.step_strategy), or cluster.actor_num_gpus_per_node = 1"
                )


def split_evenly(items: Sequence[Any], parts: int) -> list[Sequence[Any]]:
    """Split into contiguous parts whose lengths differ by at most one."""
    size, extra = divmod(len(items), parts)
    ends = [size * (k + 1) + min(k + 1, extra) for k in range(parts)]
    return [items[start:end] for start, end in zip([0, *ends[:-1]], ends, strict=True)]


def fill(
    pairs: Sequence[Pair], filler: Pair, count: int, micro_batch_size: int
) -> list[tuple[Pair, ...]]:
    """Cut into ``count`` micro-batches of equal size; what is missing has weight 0."""
    blank = replace(pairs[-1] if pairs else filler, weight=0.0)
    rows = [*pairs, *[blank] * (count * micro_batch_size - len(pairs))]
    return [
        tuple(rows[start : start + micro_batch_size])
        for start in range(0, len(rows), micro_batch_size)
    ]

"""Samples to pairs, window by window, and their arithmetic (the knobs themselves are ``drl.config.batch``'s).

``train.global_batch_size`` counts samples, ``train.micro_batch_size`` counts pairs. Units never part
across optimizer windows. ``drl.stages.shards`` lays the windows out on ranks and micro-batches.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from drl.config.batch import batch_knobs
from drl.config.steps import share_of_steps
from drl.errors import BatchError
from drl.stages.functions import CONVERT, EXPAND, chosen_units
from drl.stages.shards import Layout, Tile, Unit, build_shards, shards_of, split_evenly
from drl.types import Advantages, Pair, Rollout, Routes, Sample, Shard, StepContext

if TYPE_CHECKING:
    from drl.interfaces.loss import Loss
    from drl.run import Run

__all__ = [
    "BatchPlan",
    "batch_plan",
    "build_shards",
    "make_shards",
    "rank_count",
    "split_evenly",
    "unit_spans",
]


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
    tile: Tile | None = None
    expanded_by: str | None = None

    @property
    def samples(self) -> int:
        """Samples of one rollout."""
        return self.prompts * self.samples_per_prompt

    @property
    def pairs_per_step(self) -> int:
        """Pairs of one optimizer step, over all ranks."""
        return self.samples_per_step * self.pairs_per_sample

    @property
    def share(self) -> int:
        """Samples of one optimizer step on the fullest rank."""
        return -(-self.samples_per_step // self.ranks)

    @property
    def fitted(self) -> Tile | None:
        """The tile, no larger than what a rank has."""
        return None if self.tile is None else self.tile.within(self.share, self.pairs_per_sample)

    @property
    def micro_batches(self) -> int:
        """Micro-batches of one optimizer step on each rank."""
        if self.fitted is not None:
            return self.fitted.count(self.share, self.pairs_per_sample)
        return -(-self.share * self.pairs_per_sample // self.micro_batch_size)

    @property
    def rows(self) -> int:
        """Pairs of one forward."""
        return self.micro_batch_size if self.fitted is None else self.fitted.rows

    @property
    def filler(self) -> int:
        """Rows of weight 0 that fill up the micro-batches of one optimizer step."""
        return self.micro_batches * self.rows * self.ranks - self.pairs_per_step

    def lines(self) -> list[str]:
        """Render the plan for a person."""
        if self.expanded_by is not None:
            return [
                f"{self.prompts} prompts x {self.samples_per_prompt} samples = {self.samples} samples a "
                f"rollout, in {self.optimizer_steps} optimizer step(s); {self.expanded_by} makes their pairs"
            ]
        filler = f", {self.filler} rows of filler" if self.filler else ""
        tile = self.fitted
        pairs = f"{self.rows} pairs"
        if tile is not None:
            pairs += f" ({tile.samples} samples x {tile.steps} steps, {tile.order})"
        return [
            f"{self.prompts} prompts x {self.samples_per_prompt} samples = {self.samples} samples a rollout",
            f"{self.optimizer_steps} optimizer step(s) of {self.samples_per_step} samples "
            f"x {self.pairs_per_sample} trained steps = {self.pairs_per_step} pairs each",
            f"{self.micro_batches} micro-batches of {pairs} on each of {self.ranks} rank(s){filler}",
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
        tile=tile_of(recipe),
        expanded_by=expanding_function(recipe),
    )


def expanding_function(recipe: Any) -> str | None:
    """Return the option whose function makes the pairs; None when the loss does."""
    if recipe.rollout.custom_convert is not None:
        return CONVERT
    return EXPAND if recipe.rollout.custom_expand is not None else None


def tile_of(recipe: Any) -> Tile | None:
    """Return the tile that the recipe asks for; None for flat micro-batches."""
    samples, steps = recipe.train.micro_batch_size_sample, recipe.train.micro_batch_size_tstep
    order = recipe.train.iter_order
    if samples is None or steps is None:
        return None
    return Tile(samples=samples, steps=steps, order=order)


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
    windows = [
        [[route_pair(run, pair) for pair in unit] for unit in window]
        for window in units_by_window(run, rollout, advantages)
    ]
    if not any(unit for window in windows for unit in window):
        raise BatchError("the rollout produced no pairs: set sde.num_steps or sde.step_strategy")
    layout = Layout(
        micro_batch_size=run.recipe.train.micro_batch_size,
        ranks=run.ranks,
        split=run.recipe.train.dp_split_mode,
        tile=tile_of(run.recipe),
    )
    return shards_of(windows, layout, rollout.rollout_id)


def units_by_window(
    run: Run, rollout: Rollout, advantages: Advantages | None
) -> list[Sequence[Unit]]:
    """Let a function of the recipe, or else the loss, turn samples into units of pairs, by window."""
    samples, plan = rollout.samples, batch_plan(run.recipe)
    steps = plan.optimizer_steps
    if len(samples) != plan.samples:
        run.event(
            f"the rollout has {len(samples)} samples instead of {plan.samples}: the {steps} optimizer steps "
            "share them evenly"
        )
    values = None if advantages is None else advantages.values.tolist()
    chosen = chosen_units(run, samples, values)
    if chosen is not None:
        return split_evenly(chosen, steps)
    context = replace(run.step_context(rollout.rollout_id), routes=routes_of(run))
    spans = split_evenly(unit_spans(run.loss.unit, samples), steps)
    return [
        expand_units(run.loss, samples, window, values, replace(context, window=number))
        for number, window in enumerate(spans)
    ]


def routes_of(run: Run) -> Routes | None:
    """Return how a family of several components divides the timesteps; None for one component."""
    if len(run.family.components) == 1:
        return None
    return Routes(
        components=tuple(run.components),
        component_at=lambda timestep: run.family.route(timestep).component,
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
    spans: Sequence[tuple[int, int]],
    advantages: Sequence[float] | None,
    context: StepContext,
) -> list[Unit]:
    """Let the loss turn the units of a window, given by their sample ranges, into pairs."""
    return [
        loss.expand(
            samples[start:end], None if advantages is None else advantages[start:end], context
        )
        for start, end in spans
    ]


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

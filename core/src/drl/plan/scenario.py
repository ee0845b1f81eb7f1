"""``Scenario``: the numbers of a recipe that memory, work and time depend on, so that one can be changed alone."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from drl.errors import BadInput
from drl.interfaces.outline import EngineOutline, Outline
from drl.stages.pairs import batch_plan
from drl.stages.residence import offloads_rollout, offloads_train
from drl.stages.rollout import training_sampling
from drl.types import Need

if TYPE_CHECKING:
    from drl.interfaces.loss import Loss
    from drl.stages.pairs import BatchPlan

OPTIMIZER_STATES = {"adam": 2, "sgd": 1}
"""Numbers that an optimizer keeps for each trained one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Scenario:
    """What a recipe asks for.

    ``branches``: predictions of one guided row; ``trained_branches``: those of them with gradient.
    ``rows``: pairs of a training forward, without guidance; ``row_option`` sets them, in units of
    ``row_steps``. ``rank_pairs``: pairs of one optimizer step on one rank. ``checkpointed``: share of blocks
    that are recomputed.
    ``extra_passes``: forwards without gradient for each trained one (old policy, reference).
    ``own_weights``: what the engine holds: "shared", "fp32" or "forward". ``graphs``: it records its forwards.
    ``copies``: float32 copies of what is trained (moving average, old policy). ``rank_factor``: adapters' size
    against the recipe's own.
    ``shards``: ranks that full weights are spread over. ``cpu_offload``: shards, their gradients and the
    optimizer are on the CPU. ``released``: parts that leave the device, by name. ``checkpointed_share``: the
    ``checkpointed`` of a recipe that recomputes. ``offload_given``: one side of the offload was set by itself.
    ``shareable``: weights of adapters' base lie whole on the device, so that an engine can share them.
    ``omitted``, ``uncounted``: what work and seconds, and what memory and seconds, leave out, in words.
    """

    samples: int
    num_steps: int
    branches: int
    batched: bool
    pixels: int
    engine_rows: int
    own_weights: str
    applied: bool
    engine_compiled: bool
    graphs: bool
    rollout: bool
    optimizer_steps: int
    micro_batches: int
    rows: int
    rank_pairs: int
    row_option: str
    row_steps: int
    rows_per_pair: int
    trained_branches: int
    pairs_per_step: int
    pairs_per_sample: int
    extra_passes: int
    rescored: bool
    checkpointed: float
    compiled: bool
    adapters: bool
    optimizer_states: int
    copies: int
    shards: int
    offload_train: bool
    offload_rollout: bool
    decode_rows: int
    released: frozenset[str]
    prompts: int
    rank_factor: float = 1.0
    forward_size: int = 2
    decoded_as: str = "fp32"
    checkpointed_share: float = 1.0
    offload_given: bool = False
    cpu_offload: bool = False
    shareable: bool = True
    omitted: tuple[str, ...] = ()
    uncounted: tuple[str, ...] = ()


def scenario_of(
    recipe: Any, loss: Loss, engine: EngineOutline | None, outline: Outline
) -> Scenario:
    """Read a recipe; ``engine`` is None for a run without one, or with one that does not tell.

    Raises BadInput, as the run would, for an engine that shall share weights that are never shared.
    """
    plan = batch_plan(recipe)
    sampling = training_sampling(recipe)
    branches = 2 if sampling.guided else 1
    ranks: int = plan.ranks
    # a rollout makes all groups that it draws, also those that it leaves out
    drawn = max(plan.prompts, recipe.rollout.over_sampling_batch_size or 0)
    return Scenario(
        samples=drawn * plan.samples_per_prompt,
        num_steps=sampling.num_steps,
        branches=branches,
        batched=recipe.sampling.batched_guidance,
        pixels=sampling.height * sampling.width * sampling.num_frames,
        engine_rows=1 if engine is None else engine.rows,
        own_weights=weights_of(recipe, engine, ranks),
        applied=engine is not None and engine.adapters == "applied",
        engine_compiled=engine is not None and engine.compiled,
        graphs=engine is not None and engine.graphs_option is not None,
        rollout=engine is not None and Need.ROLLOUT in loss.needs,
        **training_of(recipe, loss, plan, branches),
        compiled=recipe.train.compile,
        adapters=recipe.lora.enabled,
        optimizer_states=states_of(recipe),
        copies=copies_of(recipe, loss),
        shards=1 if recipe.lora.enabled else ranks // recipe.train.dp_replicate_size,
        offload_train=offloads_train(recipe),
        offload_rollout=offloads_rollout(recipe),
        offload_given={recipe.cluster.offload_train, recipe.cluster.offload_rollout} != {None},
        cpu_offload=recipe.train.cpu_offload,
        shareable=ranks == 1 or recipe.train.shard_frozen == "never",
        omitted=omitted_of(recipe, engine),
        uncounted=uncounted_of(recipe, ranks),
        decode_rows=outline.decode_rows,
        decoded_as=outline.decode_dtype + ("_compiled" if outline.decode_compiled else ""),
        released=frozenset(part.name for part in outline.parts if not part.resident),
        prompts=drawn,
        forward_size=4 if recipe.train.forward_dtype == "fp32" else 2,
    )


def training_of(recipe: Any, loss: Loss, plan: BatchPlan, branches: int) -> dict[str, Any]:
    """Return the fields of a scenario about one rank's training."""
    share = recipe.model.checkpointed_share if recipe.model.gradient_checkpointing else 0.0
    tile = plan.fitted
    passes = [
        Need.OLD_PREDICTION in loss.needs,
        Need.REFERENCE in loss.needs and recipe.algorithm.ref_mode != "none",
    ]
    return {
        "optimizer_steps": plan.optimizer_steps,
        "micro_batches": plan.micro_batches,
        "rows": plan.rows,
        "rank_pairs": plan.share * plan.pairs_per_sample,
        "row_option": "train.micro_batch_size" + ("_sample" if tile else ""),
        "row_steps": tile.steps if tile else 1,
        "rows_per_pair": loss.rows_per_pair,
        "trained_branches": branches if Need.GUIDANCE in loss.needs else 1,
        "pairs_per_step": plan.pairs_per_step,
        "pairs_per_sample": plan.pairs_per_sample,
        "extra_passes": sum(passes),
        "rescored": loss.recomputes_old_log_prob,
        "checkpointed": share,
        "checkpointed_share": recipe.model.checkpointed_share,
    }


def omitted_of(recipe: Any, engine: EngineOutline | None) -> tuple[str, ...]:
    """Return what an iteration does besides the phases that are predicted."""
    found = {
        "encoding of data": recipe.train.train_only,
        "rewards": engine is not None,
        "the moves between CPU and GPU": offloads_train(recipe) or offloads_rollout(recipe),
    }
    return tuple(name for name, there in found.items() if there)


def uncounted_of(recipe: Any, ranks: int) -> tuple[str, ...]:
    """Return what several ranks add or save, which nothing here knows."""
    if ranks == 1:
        return ()
    found = ["messages between ranks"]
    if recipe.train.cpu_offload:
        found.append("moves of weights between CPU and GPU")
    if not recipe.lora.enabled or recipe.train.cpu_offload:
        found.append("what a forward gathers of sharded weights")
    elif recipe.train.shard_frozen != "never":
        found.append("frozen weights that are spread over ranks (train.shard_frozen)")
    return tuple(found)


def weights_of(recipe: Any, engine: EngineOutline | None, ranks: int) -> str:
    """Return which weights the engine will hold; "auto" is decided as the engine decides it."""
    if engine is None:
        return "shared"
    if engine.weights == "shared":
        check_shared(recipe, engine, ranks)
    if engine.weights != "auto":
        return engine.weights
    return "shared" if recipe.lora.enabled and ranks == 1 else "fp32"


def check_shared(recipe: Any, engine: EngineOutline, ranks: int) -> None:
    """Raise BadInput where it is certain before a run that no weights can be shared."""
    reason = None
    if not recipe.lora.enabled:
        reason = "it has no adapters: all of its weights may change"
    elif ranks > 1 and (recipe.train.cpu_offload or recipe.train.shard_frozen == "always"):
        reason = "its weights are sharded over the ranks (train.shard_frozen, train.cpu_offload)"
    if reason is not None:
        raise BadInput(
            f"{engine.weights_option or 'weights'} = 'shared', but the trainer has no weights to share: "
            f"{reason}; use 'auto', which shares where it can"
        )


def states_of(recipe: Any) -> int:
    """Return how many numbers the optimizer keeps for each trained one."""
    if recipe.optimizer.name == "sgd" and recipe.optimizer.momentum == 0:
        return 0
    return OPTIMIZER_STATES[recipe.optimizer.name]


def copies_of(recipe: Any, loss: Loss) -> int:
    """Return how many float32 copies of the trained weights there are."""
    return int(recipe.ema.enabled or Need.OLD_PREDICTION in loss.needs)

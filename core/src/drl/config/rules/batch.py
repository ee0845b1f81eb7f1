"""Rules about sizes and counts. B-numbers: docs/mathematics.md."""

from __future__ import annotations

from collections.abc import Iterator

from drl.config.draft import Draft
from drl.config.steps import pairs_per_sample
from drl.errors import Problem


def length_of_run(draft: Draft) -> Iterator[Problem]:
    """B17: a run needs its number of iterations."""
    if draft.get("train.num_rollout") is None and draft.get("train.num_epoch") is None:
        yield Problem(
            "train.num_rollout",
            "is required: the iterations of the run; or give train.num_epoch (B17)",
        )


def evaluation_only(draft: Draft) -> Iterator[Problem]:
    """No iteration at all makes sense only with something to evaluate."""
    evaluates = draft.get("eval.datasets") or draft.get("eval.function") is not None
    if draft.get("train.num_rollout") == 0 and not evaluates:
        yield Problem(
            "train.num_rollout",
            "is 0, which only evaluates: give eval.datasets, or a number above 0",
        )


def full_micro_batches(draft: Draft) -> Iterator[Problem]:
    """B9: the pairs of an optimizer step should fill its micro-batches."""
    size = draft.get("train.micro_batch_size")
    per_step = draft.get("train.global_batch_size")
    if per_step is None or not draft.given("train.micro_batch_size") or _tile(draft):
        return
    pairs = per_step * pairs_per_sample(draft)
    if pairs % size:
        yield Problem(
            "train.micro_batch_size",
            f"B9: {pairs} pairs per optimizer step is not a multiple of {size}; "
            f"{size - pairs % size} rows of filler are added",
            "warning",
        )


def _tile(draft: Draft) -> tuple[int, int] | None:
    sizes = draft.get("train.micro_batch_size_sample"), draft.get("train.micro_batch_size_tstep")
    return None if None in sizes else sizes


def both_sizes_of_a_tile(draft: Draft) -> Iterator[Problem]:
    """B7: a tile has two sizes; with them the flat size, without them the order has no use."""
    samples, steps = "train.micro_batch_size_sample", "train.micro_batch_size_tstep"
    tile = _tile(draft)
    if tile is None:
        given = [path for path in (samples, steps) if draft.get(path) is not None]
        for path in given:
            yield Problem(path, f"B7: set {samples} and {steps} together, or neither of them")
        if not given and draft.changed("train.iter_order"):
            yield Problem(
                "train.iter_order",
                f"is not used: micro-batches are flat; it orders tiles of {samples} x {steps}",
                "warning",
            )
    elif draft.changed("train.micro_batch_size"):
        size = draft.get("train.micro_batch_size")
        if size != tile[0] * tile[1]:
            yield Problem(
                "train.micro_batch_size",
                f"{size} is not used: a forward has {tile[0]} samples x {tile[1]} steps ({samples}, {steps})",
                "warning",
            )


def uniform_tiles(draft: Draft) -> Iterator[Problem]:
    """B10: tiles that the user asked for are all full."""
    tile, per_step = _tile(draft), draft.get("train.global_batch_size")
    if tile is None or per_step is None:
        return
    ranks = draft.get("cluster.actor_num_nodes") * draft.get("cluster.actor_num_gpus_per_node")
    share, trained = -(-per_step // ranks), pairs_per_sample(draft)
    for path, size, have, what in (
        ("train.micro_batch_size_sample", tile[0], share, "samples of an optimizer step on a rank"),
        ("train.micro_batch_size_tstep", tile[1], trained, "trained steps of a sample"),
    ):
        if have % min(size, have):
            yield Problem(
                path,
                f"B10: tiles of {size} leave a rest of {have} {what}; it needs uniform tiles: use one of "
                f"{', '.join(str(n) for n in range(1, have + 1) if have % n == 0)}",
            )


def ranks_to_deal_to(draft: Draft) -> Iterator[Problem]:
    """Dealing samples to ranks needs several of them."""
    ranks = draft.get("cluster.actor_num_nodes") * draft.get("cluster.actor_num_gpus_per_node")
    if draft.get("train.dp_split_mode") == "stride" and ranks == 1:
        yield Problem(
            "train.dp_split_mode", "is 'stride', which changes nothing on one rank", "warning"
        )


def microgroup_within_group(draft: Draft) -> Iterator[Problem]:
    """A request never holds more than the samples of one prompt."""
    size, group = draft.get("rollout.microgroup_size"), draft.get("rollout.n_samples_per_prompt")
    if draft.given("rollout.microgroup_size") and size > group:
        yield Problem(
            "rollout.microgroup_size",
            f"is {size}, but a group has only rollout.n_samples_per_prompt = {group} samples",
            "warning",
        )


BATCH_RULES = (
    length_of_run,
    evaluation_only,
    full_micro_batches,
    both_sizes_of_a_tile,
    uniform_tiles,
    ranks_to_deal_to,
    microgroup_within_group,
)

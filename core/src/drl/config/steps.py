"""Which denoising steps a recipe may train on, as far as the strategies in core tell."""

from __future__ import annotations

from drl.config.automatic import fact
from drl.config.draft import Draft, NotKnown


def trainable_steps(draft: Draft) -> frozenset[int]:
    """Return the steps that may be stochastic; NotKnown for a strategy of another package."""
    total, count = draft.get("sampling.num_steps"), draft.get("sde.num_steps")
    strategy = draft.get("sde.step_strategy")
    if strategy is None:
        return frozenset(range(min(count, total)))
    if strategy == "all":
        return frozenset(range(total))
    if strategy == "ode_and_return_last":
        return frozenset()
    if strategy == "sde_window":
        bounds = draft.option("step_strategy", strategy, "range")
        return frozenset(range(*bounds) if bounds is not None else range(total))
    if strategy == "epoch_global_random_choice":
        return frozenset(draft.option("step_strategy", strategy, "candidate_steps"))
    raise NotKnown("sde.step_strategy")


def share_of_steps(count: int, share: float) -> int:
    """Return how many of ``count`` steps a share of them is, rounded down; one at least."""
    return count if share == 1 else max(1, int(count * share))


def pairs_per_sample(draft: Draft) -> int:
    """Return how many pairs a sample becomes; NotKnown for a strategy of another package."""
    if draft.get("rollout.custom_convert") or draft.get("rollout.custom_expand"):
        raise NotKnown("rollout.custom_expand")
    if draft.get("train.train_only"):
        return 1
    option = fact(draft, "loss", "algorithm.loss", "step_share", None)
    if option is not None:
        share = draft.option("loss", draft.get("algorithm.loss"), option)
        return share_of_steps(draft.get("sampling.num_steps"), share)
    possible = len(trainable_steps(draft))
    if draft.get("sde.step_strategy") in {None, "all"}:
        return possible
    count: int = draft.get("sde.num_steps")
    return min(possible, count)

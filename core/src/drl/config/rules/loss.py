"""Rules about what a loss needs of steps, guidance, rewards, adapters and references."""

from __future__ import annotations

from collections.abc import Iterator

from drl.config.automatic import fact, needs
from drl.config.draft import Draft
from drl.config.steps import trainable_steps
from drl.errors import Problem


def density(draft: Draft) -> Iterator[Problem]:
    """A loss on transitions needs stochastic steps with a density."""
    loss, backend = draft.get("algorithm.loss"), draft.get("sde.type")
    if not needs(draft, "transition"):
        return
    if not fact(draft, "sde_backend", "sde.type", "has_density", True):
        fitting = fact(draft, "loss", "algorithm.loss", "sde_types", None)
        others = [
            entry.component.name
            for entry in draft.catalog.entries("sde_backend")
            if entry.component.facts.get("has_density", True)
            and (fitting is None or entry.component.name in fitting)
        ]
        have = f"; use {' or '.join(map(repr, others))}" if others else ""
        yield Problem(
            "sde.type", f"{backend!r} has no density, but algorithm.loss {loss!r} needs one{have}"
        )
    elif draft.get("sde.noise_level") == 0:
        yield Problem(
            "sde.noise_level",
            f"noise level 0 gives no density, but algorithm.loss {loss!r} needs one; "
            "set it above 0",
        )


def stochastic_steps(draft: Draft) -> Iterator[Problem]:
    """A loss on transitions needs steps to train on."""
    if not needs(draft, "transition"):
        return
    strategy = draft.get("sde.step_strategy")
    if strategy == "ode_and_return_last":
        yield Problem(
            "sde.step_strategy",
            f"{strategy!r} has no stochastic step, but algorithm.loss {draft.get('algorithm.loss')!r} trains "
            "on them: use 'sde_window', 'epoch_global_random_choice' or 'all'",
        )
    if strategy is not None:
        return
    count, total = draft.get("sde.num_steps"), draft.get("sampling.num_steps")
    if count == 0:
        yield Problem(
            "sde.num_steps",
            f"is 0, but algorithm.loss {draft.get('algorithm.loss')!r} trains on stochastic steps: "
            "set it above 0, or choose a sde.step_strategy",
        )
    elif count > total:
        yield Problem("sde.num_steps", f"must be at most sampling.num_steps = {total}, got {count}")
    else:
        yield Problem(
            "sde.step_strategy",
            f"is not set: the first {count} steps are stochastic in every sample",
            "warning",
        )


def supervised_or_not(draft: Draft) -> Iterator[Problem]:
    """``train_only`` and a loss without rollout belong together."""
    loss, only = draft.get("algorithm.loss"), draft.get("train.train_only")
    rollout = needs(draft, "rollout")
    if only and rollout:
        yield Problem(
            "train.train_only", f"is true, but algorithm.loss {loss!r} trains on rollouts"
        )
    elif not only and not rollout:
        yield Problem(
            "train.train_only",
            f"must be true: algorithm.loss {loss!r} trains on recorded data, without rollouts",
        )


def reward_terms(draft: Draft) -> Iterator[Problem]:
    """Rollouts are rewarded by one type or by terms of which one counts."""
    kind, terms = draft.get("reward.type"), draft.get("reward.terms")
    if kind is not None and terms:
        yield Problem("reward.type", "and reward.terms are both given; keep one of them")
    elif not any((kind, terms, draft.get("reward.custom"))) and needs(draft, "rollout"):
        have = ", ".join(draft.catalog.names("reward")) or "none"
        yield Problem("reward.type", f"is required: what is rewarded; installed: {have}")
    elif terms and all(term.weight == 0 for term in terms):
        yield Problem("reward.terms", "all have weight 0: there is nothing to train on")


def noise_without_steps(draft: Draft) -> Iterator[Problem]:
    """Where no step is stochastic, nothing of the noise is used; where one may be, there must be some."""
    if not needs(draft, "rollout") or needs(draft, "transition"):
        return
    kind, level = draft.get("sde.type"), draft.get("sde.noise_level")
    noisy = fact(draft, "sde_backend", "sde.type", "has_density", True)
    if noisy and level == 0:
        yield Problem(
            "sde.noise_level",
            f"is 0, but sde.type {kind!r} has no density without noise; set it above 0, or use "
            "sde.type 'ode'",
        )
    elif noisy and not trainable_steps(draft):
        yield from _unused(
            draft, "sde.type", "no step of the rollout is stochastic (sde.num_steps)"
        )
    elif not noisy:
        silent = f"sde.type {kind!r} adds no noise"
        if level > 0 and draft.changed("sde.noise_level"):  # a run's own recipe gives the default
            yield from _unused(draft, "sde.noise_level", silent)
        if draft.get("sde.step_strategy") is None and draft.get("sde.num_steps") > 0:
            yield from _unused(draft, "sde.num_steps", silent)


def _unused(draft: Draft, path: str, reason: str) -> Iterator[Problem]:
    if draft.given(path):
        yield Problem(path, f"is {draft.get(path)!r}, which is not used: {reason}", "warning")


def kl_at_the_last_step(draft: Draft) -> Iterator[Problem]:
    """KL divides by the variance of a step, which some backends do not have at the last one."""
    if draft.get("algorithm.kl_beta") == 0 or not needs(draft, "transition"):
        return
    if fact(draft, "sde_backend", "sde.type", "last_step_has_variance", True):
        return
    last = draft.get("sampling.num_steps") - 1
    if last in trainable_steps(draft):
        yield Problem(
            "algorithm.kl_beta",
            f"divides by the variance of a step, and sde.type {draft.get('sde.type')!r} has none at "
            f"the last one: keep step {last} out of the trained steps, or set it to 0",
        )


def unguided_families(draft: Draft) -> Iterator[Problem]:
    """A distilled model runs without guidance."""
    family = draft.get("model.family")
    if fact(draft, "family", "model.family", "guidance", "free") != "never":
        return
    for key in ("sampling.guidance_scale", "sampling.true_cfg_scale"):
        value = draft.get(key)
        if value is not None and value > 1:
            yield Problem(key, f"must be 1: family {family!r} has no guidance, got {value}")
    if draft.get("sampling.negative_prompt") is not None:
        yield Problem("sampling.negative_prompt", f"has no use: family {family!r} has no guidance")


LOSS_RULES = (
    density,
    stochastic_steps,
    supervised_or_not,
    reward_terms,
    noise_without_steps,
    kl_at_the_last_step,
    unguided_families,
)

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
        others = [
            entry.component.name
            for entry in draft.catalog.entries("sde_backend")
            if entry.component.facts.get("has_density", True)
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
    elif kind is None and not terms and needs(draft, "rollout"):
        have = ", ".join(draft.catalog.names("reward")) or "none"
        yield Problem("reward.type", f"is required: what is rewarded; installed: {have}")
    elif terms and all(term.weight == 0 for term in terms):
        yield Problem("reward.terms", "all have weight 0: there is nothing to train on")


def group_size(draft: Draft) -> Iterator[Problem]:
    """A group of one has no mean to compare with."""
    if not needs(draft, "rollout"):
        return
    if draft.get("rollout.n_samples_per_prompt") == 1:
        yield Problem(
            "rollout.n_samples_per_prompt",
            "is 1: the standard deviation is not normalised, and a sample is its own mean",
            "warning",
        )


def mean_and_deviation(draft: Draft) -> Iterator[Problem]:
    """A mean of the batch with a deviation of the group mixes two scales."""
    name = draft.get("algorithm.advantage_estimator")
    mean, std, normalized = (
        draft.option("advantage", name, key)
        for key in ("globalize_mean", "globalize_std", "std_normalization")
    )
    if needs(draft, "rollout") and mean and normalized and not std:
        yield Problem(
            f"algorithm.{name}.globalize_mean",
            "with the standard deviation of each group mixes two scales; "
            "set globalize_std = true or std_normalization = false",
            "warning",
        )


def reference(draft: Draft) -> Iterator[Problem]:
    """The KL term needs a reference: adapters to switch off, or an average of the weights."""
    beta, mode = draft.get("algorithm.kl_beta"), draft.get("algorithm.ref_mode")
    if beta > 0 and mode == "none":
        yield Problem(
            "algorithm.ref_mode",
            f"is 'none', but algorithm.kl_beta = {beta} needs a reference; use 'lora_base' or 'ema'",
        )
    elif mode == "lora_base" and not draft.get("lora.enabled"):
        path = "algorithm.ref_mode" if draft.given("algorithm.ref_mode") else "algorithm.kl_beta"
        yield Problem(
            path,
            "needs the reference 'lora_base', which is the model without its adapter: "
            "set lora.enabled = true, or algorithm.ref_mode = 'ema'",
        )
    elif mode == "ema" and needs(draft, "old_prediction"):
        if beta > 0:
            yield Problem(
                "algorithm.kl_beta",
                f"is {beta}, but the average (algorithm.ref_mode = 'ema') is the old policy that "
                f"algorithm.loss {draft.get('algorithm.loss')!r} compares with already; a KL term needs a "
                "reference of its own: use 'lora_base', or set it to 0",
            )
    elif mode in {"lora_base", "ema"} and beta == 0:
        yield Problem("algorithm.ref_mode", "is not used: algorithm.kl_beta is 0", "warning")


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
    group_size,
    mean_and_deviation,
    reference,
    kl_at_the_last_step,
    unguided_families,
)

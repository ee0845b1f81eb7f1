"""Rules about what a recipe names by a path or as a function, beside what its source says."""

from __future__ import annotations

from collections.abc import Iterator

from drl.config.automatic import fact, needs
from drl.config.describe import given_default
from drl.config.draft import Draft
from drl.config.steps import trainable_steps
from drl.errors import Problem
from drl.kinds import BY_NAME

BACKEND = "sde.backend"

SECTIONS_OF_ROLLOUTS = ("sde", "reward", "sync")
"""Sections that a run without rollouts has no part for."""
OF_ROLLOUTS = (
    "rollout.function",
    "rollout.custom_generate",
    "rollout.dynamic_sampling_filter",
    "rollout.sample_filter",
    "rollout.buffer_filter",
    "rollout.custom_log",
    "rollout.custom_eval_log",
    "rollout.over_sampling_batch_size",
    "rollout.max_draws",
    "rollout.server_concurrency",
    "rollout.shared_start",
    "trust.parity",
    "trust.settings",
)
"""Its other options without a part, of sections that it reads."""
KINDS_OF_ROLLOUTS = frozenset({"engine", "sde_backend", "updater"})
"""Kinds of components that it does not make; a table of a reward is told of where no term names it."""


def trainer_backend(draft: Draft) -> Iterator[Problem]:
    """The trainer's own mathematics of a step needs what a loss needs of the engine's."""
    backend, loss = draft.get(BACKEND), draft.get("algorithm.loss")
    if backend is None:
        return
    if not needs(draft, "transition"):
        if not draft.get("train.train_only"):  # which says so of the whole section
            reason = f"is not used: algorithm.loss {loss!r} scores no step"
            yield Problem(BACKEND, reason, "warning")
    elif not fact(draft, "sde_backend", BACKEND, "has_density", True):
        yield Problem(BACKEND, f"{backend!r} has no density, but algorithm.loss {loss!r} needs one")
    elif fact(draft, "sde_backend", BACKEND, "log_prob_no_const", False) and not draft.get(
        "sde.log_prob_no_const"
    ):
        yield Problem(
            BACKEND,
            f"{backend!r} has a log-probability without constants only; "
            "set sde.log_prob_no_const = true",
        )


def variance_of_the_last_step(draft: Draft) -> Iterator[Problem]:
    """KL divides by the variance of a step in the trainer, which some backends lack at the last one."""
    if draft.get(BACKEND) is None or draft.get("algorithm.kl_beta") == 0:
        return
    if not needs(draft, "transition"):
        return
    if fact(draft, "sde_backend", BACKEND, "last_step_has_variance", True):
        return
    last = draft.get("sampling.num_steps") - 1
    if last in trainable_steps(draft):
        yield Problem(
            BACKEND,
            f"{draft.get(BACKEND)!r} has no variance at the last step, which algorithm.kl_beta divides "
            f"by: keep step {last} out of the trained steps, or set algorithm.kl_beta = 0",
        )


def options_of_rollouts(draft: Draft) -> Iterator[Problem]:
    """A supervised run generates and scores nothing, and sends no weights.

    Only what differs from its default is told: a run's own recipe names every option.
    """
    if not draft.get("train.train_only"):
        return
    sections = [
        f"{name}.{key}"
        for name in SECTIONS_OF_ROLLOUTS
        for key in type(draft.sections[name]).model_fields
    ]
    for option in [*sections, *OF_ROLLOUTS]:
        if draft.changed(option):
            yield Problem(option, "is not used: train.train_only runs without rollouts", "warning")


def tables_of_rollouts(draft: Draft) -> Iterator[Problem]:
    """A supervised run has no engine, no SDE backend and no updater that could take options."""
    if not draft.get("train.train_only"):
        return
    for (kind, table), options in draft.options.items():
        if kind not in KINDS_OF_ROLLOUTS or options is None:
            continue
        for key, field in type(options).model_fields.items():
            path = f"{BY_NAME[kind].section}.{table}.{key}"
            if draft.given(path) and vars(options)[key] != given_default(field):
                yield Problem(
                    path, "is not used: train.train_only runs without an engine", "warning"
                )


FUNCTION_RULES = (
    trainer_backend,
    variance_of_the_last_step,
    options_of_rollouts,
    tables_of_rollouts,
)

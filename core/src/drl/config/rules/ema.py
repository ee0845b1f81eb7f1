"""Rules of the moving average of the weights (rl-post-training reference 4.5, 4.6)."""

from __future__ import annotations

from collections.abc import Iterator

from drl.config.automatic import needs
from drl.config.draft import Draft
from drl.errors import Problem

OPTIONS = ("rollout_policy", "decay_init", "decay_ramp", "decay_max", "decay_flat_steps")


def consumer(draft: Draft) -> Iterator[Problem]:
    """Whoever asks for the average must keep one, and an average that is kept must be used."""
    enabled, policy = draft.get("ema.enabled"), draft.get("ema.rollout_policy")
    mode = draft.get("algorithm.ref_mode")
    if enabled and policy != "ema" and mode != "ema" and not needs(draft, "old_prediction"):
        yield Problem(
            "ema.enabled",
            "is true, but nothing uses the average: set ema.rollout_policy = 'ema' (engines get it) or "
            "algorithm.ref_mode = 'ema' (it is the reference)",
        )
    if enabled:
        return
    if policy == "ema":
        yield Problem(
            "ema.rollout_policy", "is 'ema', but there is no average: set ema.enabled = true"
        )
    if mode == "ema":
        yield Problem(
            "algorithm.ref_mode", "is 'ema', but there is no average: set ema.enabled = true"
        )
    for key in OPTIONS[1:]:
        if draft.changed(f"ema.{key}"):
            yield Problem(f"ema.{key}", "is not used: ema.enabled is false", "warning")


def rolled_out(draft: Draft) -> Iterator[Problem]:
    """Weights for engines need engines; and samples of other weights start away from ratio 1."""
    if not draft.get("ema.enabled") or draft.get("ema.rollout_policy") != "ema":
        return
    if draft.get("train.train_only"):
        yield Problem("ema.rollout_policy", "is 'ema', but train.train_only rolls nothing out")
    elif needs(draft, "old_log_prob"):
        yield Problem(
            "ema.rollout_policy",
            f"'ema': algorithm.loss {draft.get('algorithm.loss')!r} compares the trained weights with "
            "samples of their average, so its ratio starts away from 1; a narrow clip range drops most pairs",
            "warning",
        )


def samples_of_the_old_policy(draft: Draft) -> Iterator[Problem]:
    """A loss that contrasts with the old policy wants samples of it."""
    if not draft.get("ema.enabled") or draft.get("ema.rollout_policy") == "ema":
        return
    if needs(draft, "old_prediction"):
        yield Problem(
            "ema.rollout_policy",
            f"is 'live': algorithm.loss {draft.get('algorithm.loss')!r} compares with the average, which "
            "did not make the samples; 'ema' rolls out what it compares with",
            "warning",
        )


def decay(draft: Draft) -> Iterator[Problem]:
    """A decay of 0 makes the average a copy of the weights: nothing is left to compare with."""
    if not draft.get("ema.enabled"):
        return
    init, ramp, most, flat = (draft.get(f"ema.{key}") for key in OPTIONS[1:])
    if flat == 0 and draft.changed("ema.decay_init"):
        yield Problem(
            "ema.decay_init",
            "is not used: ema.decay_flat_steps is 0, and the decay starts with ema.decay_ramp",
            "warning",
        )
    if flat and init == 0:
        yield _copies("decay_init", f"in the first {flat} updates")
    for key, value in (("decay_ramp", ramp), ("decay_max", most)):
        if value == 0:
            yield _copies(key, "after the flat updates")


def _copies(key: str, when: str) -> Problem:
    return Problem(
        f"ema.{key}",
        f"is 0: {when} the average equals the trained weights, and a loss that compares the two learns "
        "nothing from it",
        "warning",
    )


EMA_RULES = (consumer, rolled_out, samples_of_the_old_policy, decay)

"""Rules of how the trainer computes: recomputed blocks, compiled blocks."""

from __future__ import annotations

from collections.abc import Iterator

from drl.config.draft import Draft
from drl.errors import Problem

TRAINING_ALONE = ("model.gradient_checkpointing", "train.compile")
"""Options that change nothing but the trainer's own forwards."""


def recomputed_share(draft: Draft) -> Iterator[Problem]:
    """A share of recomputed blocks needs recomputed blocks; the whole, as in a run's own recipe, asks for none."""
    if draft.get("model.gradient_checkpointing") or draft.get("model.checkpointed_share") == 1:
        return
    yield Problem(
        "model.checkpointed_share",
        "is not used: model.gradient_checkpointing is false; set that to true, or leave this out",
        "warning",
    )


def nothing_to_compute(draft: Draft) -> Iterator[Problem]:
    """A run that trains nothing has no forwards of a trainer to compile or to recompute."""
    idle = draft.get("debug.rollout_only") or draft.get("train.num_rollout") == 0
    for key in TRAINING_ALONE:
        if idle and draft.given(key) and draft.get(key):
            yield Problem(key, "is not used: this run trains nothing", "warning")


DEVICE_RULES = (recomputed_share, nothing_to_compute)

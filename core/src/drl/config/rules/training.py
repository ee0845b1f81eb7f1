"""Rules about the functions that replace parts of the training."""

from __future__ import annotations

from collections.abc import Iterator

from drl.config.draft import Draft
from drl.errors import Problem

CUSTOM = "custom_loss"
CONVERT, EXPAND = "rollout.custom_convert", "rollout.custom_expand"
PROCESS = "reward.custom_post_process"


def whole_custom_loss(draft: Draft) -> Iterator[Problem]:
    """``custom_loss`` has no part of its own: every one is a function of the recipe."""
    if draft.get("algorithm.loss") != CUSTOM:
        if draft.changed("algorithm.custom_needs"):
            yield Problem(
                "algorithm.custom_needs",
                f"is not used: it belongs to algorithm.loss '{CUSTOM}', and the loss is "
                f"{draft.get('algorithm.loss')!r}",
                "warning",
            )
        return
    missing = [
        path
        for path in ("algorithm.custom_prepare", "algorithm.custom_loss")
        if not draft.get(path)
    ]
    if not draft.get(CONVERT) and not draft.get(EXPAND):
        missing.insert(0, f"{EXPAND} or {CONVERT}")
    if missing:
        yield Problem(
            "algorithm.loss",
            f"is '{CUSTOM}', which consists of functions; missing: {', '.join(missing)}",
        )


def functions_in_each_others_way(draft: Draft) -> Iterator[Problem]:
    """``custom_convert`` replaces both the advantages and the expansion."""
    if not draft.get(CONVERT):
        return
    for path in (EXPAND, PROCESS):
        if draft.get(path):
            yield Problem(
                path, f"is not used: {CONVERT} makes pairs of the samples itself", "warning"
            )


TRAINING_RULES = (whole_custom_loss, functions_in_each_others_way)

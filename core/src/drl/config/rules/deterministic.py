"""Rules of deterministic training: only kernels and variables that leave nothing to chance."""

from __future__ import annotations

import os
from collections.abc import Iterator

from drl.config.determinism import DISPATCH_VARIABLE, attention_problem, defeated
from drl.config.draft import Draft
from drl.errors import Problem


def deterministic_attention(draft: Draft) -> Iterator[Problem]:
    """The attention kernel has a deterministic form."""
    if not draft.get("train.deterministic"):
        return
    problem = attention_problem(draft.get("train.attention_backend"))
    if problem is not None:
        yield Problem("train.attention_backend", problem)


def deterministic_environment(draft: Draft) -> Iterator[Problem]:
    """Variables of the recipe and of the shell are kept, so they must not work against it."""
    if not draft.get("train.deterministic"):
        return
    given = draft.get("train.env")
    named = draft.get_or_none("train.attention_backend") is not None
    for name, text in defeated({**os.environ, **given}).items():
        if name == DISPATCH_VARIABLE and named:
            continue  # it counts only where the recipe names no kernel
        if name in given:
            yield Problem("train.env", f"{name} = {text}")
        else:
            yield Problem("train.deterministic", f"the environment has {name} = {text}")


DETERMINISTIC_RULES = (deterministic_attention, deterministic_environment)

"""Rules about what this machine has. Warnings, because a recipe may be checked elsewhere than it runs."""

from __future__ import annotations

from collections.abc import Iterator

from drl.config.draft import Draft
from drl.errors import Problem


def visible_gpu(draft: Draft) -> Iterator[Problem]:
    """A GPU that is asked for should be there."""
    if draft.machine.cuda:
        return
    for path in ("cluster.device", "sampling.generator_device"):
        value = draft.get(path)
        # one that follows from another option has nothing to add to what is said of that
        if value.startswith("cuda") and draft.given(path):
            yield Problem(path, f"is {value!r}, but no GPU is visible here", "warning")


MACHINE_RULES = (visible_gpu,)

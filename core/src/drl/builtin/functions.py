"""The functions that ship with core, by the slot that each fills."""

from __future__ import annotations

from collections.abc import Sequence

from drl.api import Component, hookimpl

DRL_API = (1, 0)


@hookimpl
def drl_register_functions() -> Sequence[Component]:
    """Offer a filter of groups, the order of the buffer, and drl's own rollout and evaluation."""
    return [
        Component(
            "zero_std",
            "drl.builtin.functions_rollout:zero_std",
            summary="Keeps a group when its rewards differ; others give no gradient.",
            slot="rollout.dynamic_sampling_filter",
        ),
        Component(
            "pop_first",
            "drl.builtin.functions_rollout:pop_first",
            summary="Takes the groups that have waited longest.",
            slot="rollout.buffer_filter",
        ),
        Component(
            "own",
            "drl.builtin.functions_rollout:own",
            summary="Drl's own rollout, for a function of yours to build on.",
            slot="rollout.function",
        ),
        Component(
            "own",
            "drl.builtin.functions_rollout:own",
            summary="Drl's own evaluation, beside a rollout.function that makes none.",
            slot="eval.function",
        ),
    ]

"""Rules about engines that are servers: options of router and transport, groups of patches."""

from __future__ import annotations

from collections.abc import Iterator

from drl.config.automatic import fact
from drl.config.draft import Draft
from drl.errors import Problem

ENGINE, PATCHES, ROUTER = "rollout.engine", "rollout.patch_groups", "rollout.use_router"
SERVED_ONLY = (
    ROUTER,
    "rollout.router_timeout",
    "rollout.router_max_connections",
    "rollout.router_failure_threshold",
    "rollout.distributed_post",
    "rollout.parser_num_workers",
    PATCHES,
)
"""Options about requests to another process, and about the code that runs there."""


def served_only(draft: Draft) -> Iterator[Problem]:
    """An engine in this process has no router, no connections and no patches."""
    if fact(draft, "engine", ENGINE, "served", False):
        return
    for path in SERVED_ONLY:
        if draft.given(path):
            name = draft.get(ENGINE)
            yield Problem(path, f"has no use: engine {name!r} runs in this process; leave it out")


def own_router(draft: Draft) -> Iterator[Problem]:
    """Requests to a server have one way."""
    if fact(draft, "engine", ENGINE, "served", False) and draft.get(ROUTER) is False:
        yield Problem(
            ROUTER,
            f"must be true: requests to engine {draft.get(ENGINE)!r} go through drl's router, another "
            "one is not supported; leave it out",
        )


def known_patches(draft: Draft) -> Iterator[Problem]:
    """A group of patches is one that the engine states."""
    if not fact(draft, "engine", ENGINE, "served", False):
        return
    known = fact(draft, "engine", ENGINE, "patch_groups", ())
    for group in draft.get(PATCHES) or ():
        if group not in known:
            have = f"it has {', '.join(known)}" if known else "it has none"
            yield Problem(
                PATCHES, f"engine {draft.get(ENGINE)!r} has no patch group {group!r}; {have}"
            )


SERVED_RULES = (served_only, own_router, known_patches)

"""A third-party plugin of one engine under two names; under the first it says that it is a server."""

from __future__ import annotations

from drl.api import Component, hookimpl

DRL_API = (1, 0)


@hookimpl
def drl_register_engines():
    facts = {
        "acme_served": {"served": True, "patch_groups": ("sgld", "ltx")},
        "acme_embedded": {},
    }
    return [
        Component(
            name,
            "acme_served_engine:Noting",
            summary="Notes what it is started with.",
            config="drl_engine_local.config:LocalOptions",
            facts=said,
        )
        for name, said in facts.items()
    ]

"""A third-party plugin of one engine that makes the mistakes that engines make."""

from __future__ import annotations

from drl.api import Component, hookimpl

DRL_API = (1, 0)


@hookimpl
def drl_register_engines():
    return [
        Component(
            "acme_faulty",
            "acme_faulty_engine:Faulty",
            summary="The local engine with one fault at a time.",
            config="drl_engine_local.config:LocalOptions",
        )
    ]

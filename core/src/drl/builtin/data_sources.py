"""The data source that ships with core: ``jsonl``."""

from __future__ import annotations

from collections.abc import Sequence

from drl.api import Component, hookimpl

DRL_API = (1, 0)


@hookimpl
def drl_register_data_sources() -> Sequence[Component]:
    """Offer ``jsonl``."""
    return [
        Component(
            "jsonl",
            "drl.builtin.data_jsonl:JsonlSource",
            summary="Prompts from a JSON-lines file, one row per prompt.",
            config="drl.builtin.config_data:JsonlOptions",
        )
    ]

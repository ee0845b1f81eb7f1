"""The loggers that ship with core: ``console`` and ``jsonl``."""

from __future__ import annotations

from collections.abc import Sequence

from drl.api import Component, hookimpl

DRL_API = (1, 0)


@hookimpl
def drl_register_loggers() -> Sequence[Component]:
    """Offer ``console`` and ``jsonl``."""
    return [
        Component(
            "console",
            "drl.builtin.logger_console:ConsoleLogger",
            summary="A live view in a terminal, else one plain line per iteration.",
            config="drl.builtin.config_loggers:ConsoleOptions",
        ),
        Component(
            "jsonl",
            "drl.builtin.logger_jsonl:JsonlLogger",
            summary="One JSON object per iteration in metrics.jsonl of the run directory.",
        ),
    ]

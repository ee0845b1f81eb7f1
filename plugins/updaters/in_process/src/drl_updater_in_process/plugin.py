"""Registers the updaters for engines in the trainer's own process."""

from __future__ import annotations

from drl.api import Component, hookimpl

DRL_API = (1, 0)


@hookimpl
def drl_register_updaters() -> list[Component]:
    """Offer one updater per payload."""
    return [
        Component(
            "in_process_full",
            "drl_updater_in_process.updater:InProcessFull",
            summary="All trained weights, handed to an engine in the same process.",
            facts={"payload": "dense", "transport": "local"},
        ),
        Component(
            "in_process_lora",
            "drl_updater_in_process.updater:InProcessLora",
            summary="Adapters, handed to an engine in the same process that merges them.",
            facts={"payload": "lora", "transport": "local"},
        ),
        Component(
            "in_process_merged",
            "drl_updater_in_process.updater:InProcessMerged",
            summary="Weights with adapters merged by the trainer, handed to an engine in the same process.",
            facts={"payload": "merged", "transport": "local"},
        ),
    ]

"""Three updaters for engines in the trainer's process; they differ in what a bucket carries.

Full weights and weights that the trainer merged travel as "dense" buckets; adapters travel as
"lora_merge" buckets, with their rank and alpha, and the engine merges them into its own base.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from drl.api import Context, EngineHandle, PackedUnits, PushReport, SyncPlan, Updater
from drl_updater_in_process.sender import Sender, drained


class InProcess(Updater):
    """What the three share; ``bucket`` is the payload that the engine is told."""

    transport = "local"
    bucket = "dense"

    def __init__(self, options: Any, context: Context) -> None:
        super().__init__(options, context)
        self.sender = Sender(self.bucket)
        self.rank = 0

    def connect(self, trainer: Context, engines: Sequence[EngineHandle]) -> None:
        """Open a client of each engine, on the rank whose process they live in."""
        self.rank = trainer.rank
        if self.rank == 0:
            self.sender.connect(engines)

    def push(self, component: str, buckets: Iterator[PackedUnits], version: int) -> PushReport:
        """Hand every bucket to every engine; other ranks only help to make the buckets."""
        if self.rank != 0:
            return drained(component, buckets, version)
        return self.sender.push(component, buckets, version)

    def close(self) -> None:
        """Let go of the engines."""
        self.sender.close()


class InProcessFull(InProcess):
    """Pushes all trained weights."""

    payload = "dense"

    def accepts(self, plan: SyncPlan) -> str | None:
        """Take full training beside engines in this process."""
        if plan.trained != "full":
            return "the run trains adapters, not full weights"
        return misfit(plan, self.bucket)


class InProcessMerged(InProcess):
    """Pushes weights into which core has merged the adapters; any adapter will do."""

    payload = "merged"

    def accepts(self, plan: SyncPlan) -> str | None:
        """Take adapter training beside engines in this process."""
        if plan.trained != "adapters":
            return "the run trains full weights, there is nothing to merge"
        return misfit(plan, self.bucket)


class InProcessLora(InProcess):
    """Pushes adapters; needs one rank and alpha for all layers, as the bucket has room for one."""

    payload = "lora"
    bucket = "lora_merge"

    def accepts(self, plan: SyncPlan) -> str | None:
        """Take uniform adapters beside engines in this process that merge."""
        if plan.trained != "adapters":
            return "the run trains full weights, there is no adapter to push"
        if not plan.uniform_adapters:
            return "adapters with a rank or alpha per layer must be merged by the trainer"
        return misfit(plan, self.bucket)


def misfit(plan: SyncPlan, payload: str) -> str | None:
    """Say why engines of this plan cannot be reached in this process, or None."""
    if plan.placement != "same_process":
        return f"engines and trainer are not in one process (placement {plan.placement})"
    if not plan.engines:
        return "the run has no engine to push to"
    for capabilities in plan.engines:
        if "local" not in capabilities.transports:
            offered = ", ".join(sorted(capabilities.transports)) or "none"
            return f"the engine has no transport 'local'; it has {offered}"
        if payload not in capabilities.payloads:
            offered = ", ".join(sorted(capabilities.payloads)) or "none"
            return f"the engine takes no {payload} buckets; it takes {offered}"
    return None

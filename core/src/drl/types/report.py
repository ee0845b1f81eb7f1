"""What stages report to hooks, loggers and the run: steps, parity, evaluations, claims."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from drl.types.sample import Sample


@dataclass(frozen=True, slots=True, kw_only=True)
class StepReport:
    """One optimizer step: reduced metrics by full name (``train/loss`` …), and whether it was skipped."""

    rollout_id: int
    window: int
    global_step: int
    metrics: Mapping[str, float]
    skipped: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ParityReport:
    """Rollout against trainer before the first optimizer step.

    ``by_step``: max absolute log-prob difference per denoising step number; ``rows``: pairs compared.
    ``mean_by_step``: the mean absolute difference over the ``rows_by_step`` pairs of a step.
    """

    by_step: Mapping[int, float]
    rows: int
    mean_by_step: Mapping[int, float] = field(default_factory=dict)
    rows_by_step: Mapping[int, int] = field(default_factory=dict)

    @property
    def mean(self) -> float:
        """Mean difference over all pairs, NaN if one is NaN; 0.0 when nothing was compared."""
        total = sum(self.mean_by_step[step] * rows for step, rows in self.rows_by_step.items())
        return total / max(1, sum(self.rows_by_step.values()))

    @property
    def worst(self) -> float:
        """Largest difference over all steps, NaN if one is NaN; 0.0 when nothing was compared."""
        values = self.by_step.values()
        return next((value for value in values if value != value), max(values, default=0.0))  # noqa: PLR0124


@dataclass(frozen=True, slots=True, kw_only=True)
class EvaluationReport:
    """Held-out scores after an iteration, by data set and sampler: means, and each sample's reward.

    ``metrics``: further figures for the log, by full name. ``logged``: False leaves the means out of it.
    """

    rollout_id: int
    version: int
    means: Mapping[str, float]
    samples: Mapping[str, Sequence[Sample]] = field(default_factory=dict)
    metrics: Mapping[str, float] = field(default_factory=dict)
    logged: bool = True


@dataclass(frozen=True, slots=True)
class Verdict:
    """Answer to an evaluation: ``action`` "keep" (this checkpoint) or "stop" (the run), and why."""

    action: str
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointFacts:
    """What a family may look at to claim a checkpoint: the reference and the parsed model_index.json."""

    reference: str
    model_index: Mapping[str, Any] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Claim:
    """A family takes a checkpoint: ``by`` "class" (in model_index.json) or "name" (a pattern)."""

    family: str
    by: str
    pattern: str = ""

"""One optimizer step: accumulate weighted sums, agree that everything is finite, clip, step."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch

from drl.stages.loss import Forward, loss_of
from drl.types import LossOutput, Pair, StepContext

if TYPE_CHECKING:
    from torch import Tensor, nn


@dataclass(slots=True)
class Totals:
    """Running sums of the metrics of one step; tensors stay on the device until ``reduced``."""

    sums: dict[str, Tensor] = field(default_factory=dict)
    counts: dict[str, Tensor] = field(default_factory=dict)
    maxima: dict[str, Tensor] = field(default_factory=dict)

    def add(self, output: LossOutput) -> None:
        """Take the metrics of one micro-batch."""
        for name, metric in output.metrics.items():
            total, count = metric.total.detach().double(), metric.count.detach().double()
            if metric.reduction == "max":
                self.maxima[name] = torch.maximum(self.maxima.get(name, total), total)
                continue
            self.sums[name] = self.sums.get(name, torch.zeros_like(total)) + total
            self.counts[name] = self.counts.get(name, torch.zeros_like(count)) + count

    def reduced(self, prefix: str) -> dict[str, float]:
        """Return the figures by full name; a mean over nothing is left out."""
        values = {f"{prefix}{name}": value.item() for name, value in self.maxima.items()}
        for name, total in self.sums.items():
            count = self.counts[name].item()
            if count > 0:
                values[f"{prefix}{name}"] = total.item() / count
        return values


@dataclass(frozen=True, slots=True, kw_only=True)
class WindowResult:
    """What one window's backward passes left behind: metrics, and what was not finite."""

    metrics: Mapping[str, float]
    broken: str | None


def accumulate(
    forward: Forward,
    window: Sequence[tuple[Pair, ...]],
    divisor: float,
    context: StepContext,
) -> WindowResult:
    """Run forward and backward of every micro-batch; gradients hold the weighted mean afterwards."""
    totals = Totals()
    finite = []
    for pairs in window:
        output = loss_of(forward, pairs, context)
        loss = output.loss / divisor
        loss.backward()  # type: ignore[no-untyped-call]
        finite.append(loss.detach().isfinite())
        totals.add(output)
    # one transfer for the whole window, not one per micro-batch
    flags = torch.stack(finite).tolist()
    return WindowResult(metrics=totals.reduced("train/"), broken=_broken_batch(window, flags))


def _broken_batch(window: Sequence[tuple[Pair, ...]], flags: Sequence[bool]) -> str | None:
    for number, (pairs, good) in enumerate(zip(window, flags, strict=True)):
        if not good:
            ids = [pair.id for pair in pairs if pair.weight]
            return f"non-finite loss in micro-batch {number} (pairs {ids[:8]})"
    return None


def clip_gradients(
    named: Iterable[tuple[str, nn.Parameter]], limit: float
) -> tuple[float, str | None]:
    """Clip by global norm; return the norm before clipping and the first non-finite gradient's name."""
    parameters = [(name, p) for name, p in named if p.grad is not None]
    total = torch.nn.utils.get_total_norm([p.grad for _, p in parameters if p.grad is not None])
    norm = total.item()
    if math.isfinite(norm):
        torch.nn.utils.clip_grads_with_norm_([p for _, p in parameters], limit, total)
        return norm, None
    # clipping by a norm that is not finite would spread the damage: name it first
    for name, parameter in parameters:
        if parameter.grad is not None and not parameter.grad.isfinite().all():
            return norm, f"non-finite gradient in {name}"
    return norm, "gradient norm overflows"


def mean_of(rows: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Average metrics over the optimizer steps of one rollout."""
    values: dict[str, list[float]] = defaultdict(list)
    for row in rows:
        for name, value in row.items():
            values[name].append(value)
    return {name: sum(column) / len(column) for name, column in values.items()}

"""One optimizer step: accumulate weighted sums, agree that everything is finite, clip, step."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
from torch.distributed.tensor import DTensor

from drl.errors import ContractError
from drl.model.parallel import ALONE, Ranks
from drl.model.shards import local
from drl.stages.loss import Forward, loss_of
from drl.types import EMPTY, LossOutput, Pair, StepContext

if TYPE_CHECKING:
    from torch import Tensor, nn

CLIP_EPS = 1e-6
"""As in torch.nn.utils: the divisor of a gradient that is clipped."""


@dataclass(frozen=True, slots=True)
class Figures:
    """Sums of metrics as plain numbers: what ranks tell each other."""

    sums: Mapping[str, float] = EMPTY
    counts: Mapping[str, float] = EMPTY
    maxima: Mapping[str, float] = EMPTY

    def reduced(self, prefix: str) -> dict[str, float]:
        """Return the figures by full name; a mean over nothing is left out."""
        values = {f"{prefix}{name}": value for name, value in self.maxima.items()}
        for name, total in self.sums.items():
            if self.counts[name] > 0:
                values[f"{prefix}{name}"] = total / self.counts[name]
        return values


def merged(parts: Sequence[Figures]) -> Figures:
    """Add the figures of all ranks up; a rank may lack some."""
    if len(parts) == 1:
        return parts[0]
    sums: dict[str, float] = defaultdict(float)
    counts: dict[str, float] = defaultdict(float)
    maxima: dict[str, float] = {}
    for part in parts:
        for name, total in part.sums.items():
            sums[name] += total
            counts[name] += part.counts[name]
        for name, value in part.maxima.items():
            # NaN must not hide behind max
            best = maxima.get(name, value)
            maxima[name] = value if math.isnan(value) else max(best, value)
    return Figures(dict(sums), dict(counts), maxima)


@dataclass(slots=True)
class Totals:
    """Running sums of the metrics of one step; tensors stay on the device until ``figures``."""

    sums: dict[str, Tensor] = field(default_factory=dict)
    counts: dict[str, Tensor] = field(default_factory=dict)
    maxima: dict[str, Tensor] = field(default_factory=dict)

    def add(self, output: LossOutput) -> None:
        """Take the metrics of one micro-batch; ContractError for one that is reduced in two ways."""
        for name, metric in output.metrics.items():
            other = self.maxima if metric.reduction == "mean" else self.sums
            if metric.reduction not in {"mean", "max"} or name in other:
                raise ContractError(
                    f"metric '{name}' is reduced by '{metric.reduction}'; a metric is a 'mean' or a 'max', "
                    "the same in every micro-batch"
                )
            total, count = metric.total.detach().double(), metric.count.detach().double()
            if metric.reduction == "max":
                self.maxima[name] = torch.maximum(self.maxima.get(name, total), total)
                continue
            self.sums[name] = self.sums.get(name, torch.zeros_like(total)) + total
            self.counts[name] = self.counts.get(name, torch.zeros_like(count)) + count

    def figures(self) -> Figures:
        """Return the sums as numbers."""
        return Figures(numbers(self.sums), numbers(self.counts), numbers(self.maxima))

    def reduced(self, prefix: str) -> dict[str, float]:
        """Return the figures by full name; a mean over nothing is left out."""
        return self.figures().reduced(prefix)


def numbers(values: Mapping[str, Tensor]) -> dict[str, float]:
    """Return scalar tensors as numbers."""
    return {name: value.item() for name, value in values.items()}


@dataclass(frozen=True, slots=True, kw_only=True)
class WindowResult:
    """What one window's backward passes left behind: metrics, and what was not finite."""

    figures: Figures
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
    return WindowResult(figures=totals.figures(), broken=_broken_batch(window, flags))


def measure(
    forward: Forward, window: Sequence[tuple[Pair, ...]], context: StepContext
) -> WindowResult:
    """Run the training forward of every micro-batch for its figures; no backward pass, no gradient kept."""
    totals = Totals()
    finite = []
    for pairs in window:
        # with gradients on, as in training: without, a forward may take another path
        output = loss_of(forward, pairs, context)
        finite.append(output.loss.detach().isfinite())
        totals.add(output)
    flags = torch.stack(finite).tolist()
    return WindowResult(figures=totals.figures(), broken=_broken_batch(window, flags))


def _broken_batch(window: Sequence[tuple[Pair, ...]], flags: Sequence[bool]) -> str | None:
    for number, (pairs, good) in enumerate(zip(window, flags, strict=True)):
        if not good:
            ids = [pair.id for pair in pairs if pair.weight]
            return f"non-finite loss in micro-batch {number} (pairs {ids[:8]})"
    return None


def agree(result: WindowResult, ranks: Ranks) -> WindowResult:
    """Return on every rank the figures of all, and the first rank's word on what is not finite."""
    if ranks.world == 1:
        return result
    results = ranks.gather(result)
    broken = [f"{each.broken} on rank {rank}" for rank, each in enumerate(results) if each.broken]
    figures = merged([each.figures for each in results])
    return WindowResult(figures=figures, broken=broken[0] if broken else None)


def clip_gradients(
    named: Iterable[tuple[str, nn.Parameter]], limit: float, ranks: Ranks = ALONE
) -> tuple[float, str | None]:
    """Clip by global norm; return the norm before clipping and the first non-finite gradient's name.

    Both are the same on every rank. Gradients of whole parameters must be summed over ranks already.
    """
    parameters = [(name, p) for name, p in named if p.grad is not None]
    if ranks.world > 1:
        return clip_on_ranks(parameters, limit, ranks)
    total = total_norm([p.grad for _, p in parameters if p.grad is not None])
    norm = total.item()
    if math.isfinite(norm):
        torch.nn.utils.clip_grads_with_norm_([p for _, p in parameters], limit, total)
        return norm, None
    # clipping by a norm that is not finite would spread the damage: name it first
    return norm, first_broken(parameters) or "gradient norm overflows"


def total_norm(grads: Sequence[Tensor]) -> Tensor:
    """Return the norm of all elements, a float32 scalar whatever dtype the gradients have."""
    if not grads:
        return torch.zeros(())
    norms = torch._foreach_norm(list(grads), 2, torch.float32)
    total: Tensor = torch.linalg.vector_norm(torch.stack(norms))
    return total


def clip_on_ranks(
    parameters: Sequence[tuple[str, nn.Parameter]], limit: float, ranks: Ranks
) -> tuple[float, str | None]:
    """Clip by the norm over all ranks: parts of sharded gradients add up, whole ones count once."""
    grads = [p.grad for _, p in parameters if p.grad is not None]
    parts = [grad.to_local() for grad in grads if isinstance(grad, DTensor)]
    whole = [grad for grad in grads if not isinstance(grad, DTensor)]
    squares = sum(ranks.gather(square_sum(parts))) / ranks.replicas
    norm = math.sqrt(squares + square_sum(whole))
    if not math.isfinite(norm):
        names = [name for name in ranks.gather(first_broken(parameters)) if name]
        return norm, names[0] if names else "gradient norm overflows"
    factor = limit / (norm + CLIP_EPS)
    if factor < 1.0 and grads:
        torch._foreach_mul_([*parts, *whole], factor)
    return norm, None


def square_sum(tensors: Sequence[Tensor]) -> float:
    """Return the sum of squares of all elements, added up in float64."""
    filled = [tensor for tensor in tensors if tensor.numel()]
    if not filled:
        return 0.0
    norms = torch.stack(torch._foreach_norm(filled, 2, torch.float32)).double()
    return float(norms.square().sum().item())


def first_broken(parameters: Sequence[tuple[str, nn.Parameter]]) -> str | None:
    """Name the first gradient of which this rank holds an element that is not finite."""
    for name, parameter in parameters:
        if parameter.grad is not None and not local(parameter.grad).isfinite().all():
            return f"non-finite gradient in {name}"
    return None


def mean_of(rows: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Average metrics over the optimizer steps of one rollout."""
    values: dict[str, list[float]] = defaultdict(list)
    for row in rows:
        for name, value in row.items():
            values[name].append(value)
    return {name: sum(column) / len(column) for name, column in values.items()}

"""One optimizer step: accumulate weighted sums, agree that everything is finite, clip, step."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch.distributed.tensor import DTensor

from drl.model.parallel import ALONE, Ranks
from drl.model.shards import local
from drl.stages.loss import Forward, loss_of
from drl.stages.totals import Figures, Totals, merged
from drl.types import Pair, StepContext

if TYPE_CHECKING:
    from torch import Tensor, nn

CLIP_EPS = 1e-6
"""As in torch.nn.utils: the divisor of a gradient that is clipped."""


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
) -> Totals:
    """Run forward and backward of every micro-batch; gradients hold the weighted mean afterwards.

    Launches and never waits: on a GPU the work may still go on when this returns.
    """
    totals = Totals()
    for pairs in window:
        output = loss_of(forward, pairs, context)
        loss = output.loss / divisor
        loss.backward()  # type: ignore[no-untyped-call]
        totals.add(output.metrics, loss)
    return totals


def measure(forward: Forward, window: Sequence[tuple[Pair, ...]], context: StepContext) -> Totals:
    """Run the training forward of every micro-batch for its figures; no backward pass, no gradient kept."""
    totals = Totals()
    for pairs in window:
        # with gradients on, as in training: without, a forward may take another path
        output = loss_of(forward, pairs, context)
        totals.add(output.metrics, output.loss.detach())
        del output  # its graph has the activations of the whole forward, and no backward frees them
    return totals


def result_of(window: Sequence[tuple[Pair, ...]], totals: Totals) -> WindowResult:
    """Read what the micro-batches left on the device, and name the first whose loss is not finite."""
    figures, losses = totals.read()
    broken = None
    for number, (pairs, loss) in enumerate(zip(window, losses, strict=True)):
        if not math.isfinite(loss):
            ids = [pair.id for pair in pairs if pair.weight]
            broken = f"non-finite loss in micro-batch {number} (pairs {ids[:8]})"
            break
    return WindowResult(figures=figures, broken=broken)


def agree(result: WindowResult, ranks: Ranks) -> WindowResult:
    """Return on every rank the figures of all, and the first rank's word on what is not finite."""
    if ranks.world == 1:
        return result
    results = ranks.gather(result)
    broken = [f"{each.broken} on rank {rank}" for rank, each in enumerate(results) if each.broken]
    figures = merged([each.figures for each in results])
    return WindowResult(figures=figures, broken=broken[0] if broken else None)


Verdict = tuple[float, str | None]
"""The norm of the gradients before clipping, and the first that is not finite."""


def start_clipping(
    named: Iterable[tuple[str, nn.Parameter]], limit: float, ranks: Ranks = ALONE
) -> Callable[[], Verdict]:
    """Clip by global norm; return what waits for the norm before clipping and names a broken gradient.

    Alone everything is launched here, before anybody waits for the window. The verdict is the same on
    every rank; gradients of whole parameters must be summed over ranks already.
    """
    parameters = [(name, p) for name, p in named if p.grad is not None]
    if ranks.world > 1:
        return partial(clip_on_ranks, parameters, limit, ranks)
    total = total_norm([p.grad for _, p in parameters if p.grad is not None])
    # clipping by a norm that is not finite would spread the damage: by 0 it changes nothing
    usable = total.nan_to_num(nan=0.0, posinf=0.0)
    torch.nn.utils.clip_grads_with_norm_([p for _, p in parameters], limit, usable)
    return partial(_verdict, parameters, total)


def _verdict(parameters: Sequence[tuple[str, nn.Parameter]], total: Tensor) -> Verdict:
    norm = total.item()
    if math.isfinite(norm):
        return norm, None
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
) -> Verdict:
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

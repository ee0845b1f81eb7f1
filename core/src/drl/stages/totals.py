"""The figures of one optimizer window: scalars that stay on the device until all of them leave together."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from drl.errors import ContractError
from drl.mathematics.transfer import moved
from drl.types import EMPTY, Metric

if TYPE_CHECKING:
    from torch import Tensor


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
            maxima[name] = larger(maxima.get(name, value), value)
    return Figures(dict(sums), dict(counts), maxima)


def larger(best: float, value: float) -> float:
    """Return the larger number; NaN must not hide behind max."""
    return value if math.isnan(value) else max(best, value)


class Totals:
    """Metrics and losses of a window's micro-batches, each micro-batch as one vector on the device.

    Sums are those of float64, micro-batch by micro-batch, as plain numbers.
    """

    def __init__(self) -> None:
        self._reductions: dict[str, str] = {}
        self._vectors: list[Tensor] = []
        self._places: list[dict[str, tuple[int, int]]] = []

    def add(self, metrics: Mapping[str, Metric], loss: Tensor) -> None:
        """Take one micro-batch; ContractError for a metric that is reduced in two ways."""
        scalars, found = [loss], {id(loss): 0}

        def place_of(value: Tensor) -> int:
            # many metrics share one count
            if id(value) not in found:
                found[id(value)] = len(scalars)
                scalars.append(value)
            return found[id(value)]

        for name, metric in metrics.items():
            self._check(name, metric.reduction)
        places = {n: (place_of(m.total), place_of(m.count)) for n, m in metrics.items()}
        self._vectors.append(torch.stack([_scalar(value, loss.device) for value in scalars]))
        self._places.append(places)

    def _check(self, name: str, reduction: str) -> None:
        if (
            reduction not in {"mean", "max"}
            or self._reductions.setdefault(name, reduction) != reduction
        ):
            raise ContractError(
                f"metric '{name}' is reduced by '{reduction}'; a metric is a 'mean' or a 'max', "
                "the same in every micro-batch"
            )

    def read(self) -> tuple[Figures, list[float]]:
        """Return the figures, and each micro-batch's loss; the one transfer, which waits for the device."""
        values = torch.cat(self._vectors).tolist() if self._vectors else []
        sums: dict[str, float] = defaultdict(float)
        counts: dict[str, float] = defaultdict(float)
        maxima: dict[str, float] = {}
        losses, start = [], 0
        for vector, places in zip(self._vectors, self._places, strict=True):
            losses.append(values[start])
            for name, (total, count) in places.items():
                value = values[start + total]
                if self._reductions[name] == "max":
                    maxima[name] = larger(maxima.get(name, value), value)
                    continue
                sums[name] += value
                counts[name] += values[start + count]
            start += len(vector)
        return Figures(dict(sums), dict(counts), maxima), losses


def _scalar(value: Tensor, device: torch.device) -> Tensor:
    """Return a scalar that a stack of floating point numbers takes without rounding it."""
    value = moved(value.detach().reshape(()), device)
    return value if value.is_floating_point() else value.double()

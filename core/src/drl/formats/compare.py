"""How far two adapters are apart, layer by layer, without forming a weight-sized matrix."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from drl.formats.adapter import Adapter, AdapterLayer


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """One layer of two adapters. Norms are Frobenius norms of ``scale * B A``.

    ``relative``: norm of the difference over the norm of the first; 1 when only one of them adapts the
    layer, inf when the first is zero and the second is not.
    """

    component: str
    path: str
    first: float
    second: float
    relative: float
    missing: str = ""


def delta_norm(layer: AdapterLayer) -> float:
    """Return the Frobenius norm of ``scale * B A``."""
    return _norm(*layer.factors())


def _norm(B: torch.Tensor, A: torch.Tensor) -> float:
    """Norm of ``B A`` from the two small triangular factors, in float64."""
    rank = B.shape[1]
    if rank >= min(B.shape[0], A.shape[1]):
        return float(torch.linalg.matrix_norm(B @ A))
    left, right = torch.linalg.qr(B, mode="r").R, torch.linalg.qr(A.T, mode="r").R
    return float(torch.linalg.matrix_norm(left @ right.T))


def compare(first: Adapter, second: Adapter) -> list[Difference]:
    """Compare two adapters; every layer of either, largest relative difference first."""
    lines = []
    for component in dict.fromkeys([*first.components, *second.components]):
        ours = first.components.get(component, {})
        theirs = second.components.get(component, {})
        for path in dict.fromkeys([*ours, *theirs]):
            lines.append(_line(component, path, ours.get(path), theirs.get(path)))
    return sorted(lines, key=lambda line: (-line.relative, line.component, line.path))


def _line(
    component: str, path: str, first: AdapterLayer | None, second: AdapterLayer | None
) -> Difference:
    norms = [0.0 if one is None else delta_norm(one) for one in (first, second)]
    if first is None or second is None:
        missing = "first" if first is None else "second"
        relative = 0.0 if not any(norms) else 1.0
    elif first.shape != second.shape:
        missing, relative = "", math.inf
    elif _is_same(first, second):
        missing, relative = "", 0.0
    else:
        (B, A), (D, C) = first.factors(), second.factors()
        distance = _norm(torch.cat([B, -D], dim=1), torch.cat([A, C]))
        missing, relative = "", _ratio(distance, norms[0])
    return Difference(
        component=component,
        path=path,
        first=norms[0],
        second=norms[1],
        relative=relative,
        missing=missing,
    )


def _is_same(first: AdapterLayer, second: AdapterLayer) -> bool:
    """Say whether two layers are equal to the bit, so that rounding does not hide it."""
    same = first.scale == second.scale and first.rank == second.rank
    return same and torch.equal(first.A, second.A) and torch.equal(first.B, second.B)


def _ratio(distance: float, norm: float) -> float:
    if norm == 0:
        return 0.0 if distance == 0 else math.inf
    return distance / norm


def strengths(adapter: Adapter) -> dict[str, list[str]]:
    """Return what two adapters are compared by at a glance: modules, ranks, alphas and scales."""
    layers = [layer for one in adapter.components.values() for layer in one.values()]
    return {
        "modules": [str(len(layers))],
        "rank": sorted({f"{layer.rank}" for layer in layers}),
        "alpha": sorted({f"{layer.alpha:g}" for layer in layers}),
        "scale": sorted({f"{layer.scale:g}" for layer in layers}),
    }

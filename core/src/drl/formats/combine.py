"""``drl adapters merge``: several adapters as one, exactly by concatenation or within a rank by SVD."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from drl.errors import BadInput
from drl.formats.adapter import Adapter, AdapterLayer
from drl.formats.compare import compare

METHODS = ("concat", "svd")


def combine(parts: Sequence[tuple[Adapter, float]], *, method: str, rank: int | None) -> Adapter:
    """Return the weighted sum of adapters.

    ``concat``: exact, the rank of a layer is the sum of the ranks that it has in ``parts``. ``svd``: the
    best approximation of rank ``rank``. Computed in float64, stored in float32, at scale 1. A layer that
    some parts lack is the sum of the others. Raises BadInput for shapes that differ and for adapters
    with other trained tensors.
    """
    if (rank is None) != (method == "concat"):
        raise BadInput("--rank belongs to --method svd, which needs it; concat keeps every rank")
    for adapter, _ in parts:
        if adapter.others:
            raise BadInput(
                "adapters with trained biases or modules_to_save cannot be combined; merge them into the "
                "base instead (drl export --format merged)"
            )
    names = dict.fromkeys(name for adapter, _ in parts for name in adapter.components)
    components = {}
    for name in names:
        paths = dict.fromkeys(p for adapter, _ in parts for p in adapter.components.get(name, {}))
        components[name] = {path: _combined(parts, name, path, rank) for path in paths}
    return Adapter(
        components=components,
        base_model=next((a.base_model for a, _ in parts if a.base_model), None),
        boundary_ratio=next((a.boundary_ratio for a, _ in parts if a.boundary_ratio), None),
    )


def _combined(
    parts: Sequence[tuple[Adapter, float]], component: str, path: str, rank: int | None
) -> AdapterLayer:
    present = [
        (adapter.components[component][path], weight)
        for adapter, weight in parts
        if path in adapter.components.get(component, {})
    ]
    shapes = {layer.shape for layer, _ in present}
    if len(shapes) > 1:
        raise BadInput(
            f"{component}.{path} has another shape in each adapter ({sorted(map(list, shapes))}); they belong "
            "to different base models"
        )
    factors = [(layer.factors(), weight) for layer, weight in present]
    B = torch.cat([B * weight for (B, _), weight in factors], dim=1)
    A = torch.cat([A for (_, A), _ in factors])
    if rank is not None:
        B, A = truncated(B, A, rank)
    return _layer(B, A, present[0][0])


def truncated(B: torch.Tensor, A: torch.Tensor, rank: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the factors of the best approximation of ``B A`` with at most ``rank`` columns.

    Eckart and Young (1936), by an SVD of the small core between two QR decompositions.
    """
    Q, R = torch.linalg.qr(B)
    P, S = torch.linalg.qr(A.T)
    U, values, V = torch.linalg.svd(R @ S.T)
    kept = min(rank, values.numel())
    root = values[:kept].sqrt()
    return Q @ U[:, :kept] * root, (P @ V[:kept].T * root).T


def _layer(B: torch.Tensor, A: torch.Tensor, like: AdapterLayer) -> AdapterLayer:
    rank = B.shape[1]
    return AdapterLayer(
        A=A.float().reshape(rank, *like.A.shape[1:]).contiguous(),
        B=B.float().reshape(B.shape[0], rank, *like.B.shape[2:]).contiguous(),
        alpha=float(rank),
    )


def truncation_error(exact: Adapter, approximate: Adapter) -> float:
    """Return the largest relative error of a layer that an approximation brought."""
    return max((line.relative for line in compare(exact, approximate)), default=0.0)

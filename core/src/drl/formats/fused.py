"""Fused layers of original repositories: q, k and v in one matrix (lora.md 3.4).

Fusing is exact: the A matrices lie above each other, each B has its own columns. Splitting cuts the
rows of B and repeats A; columns that a part does not use are left out of it, so what was fused comes
back as it was.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from drl.formats.adapter import AdapterLayer


def fuse(parts: Sequence[AdapterLayer | None], rows: Sequence[int]) -> AdapterLayer:
    """Join the layers of one fused matrix; ``rows`` are the output sizes, also of parts without one.

    The rank is the sum of the ranks. Where scales differ they go into B, in float32, rounded once.
    """
    present = [part for part in parts if part is not None]
    total = sum(part.rank for part in present)
    same = len({part.scale for part in present}) == 1
    B = present[0].B.new_zeros((sum(rows), total, *present[0].B.shape[2:]))
    row = column = 0
    for part, size in zip(parts, rows, strict=True):
        if part is not None:
            block = part.B if same else (part.B.float() * part.scale).to(B.dtype)
            B[row : row + size, column : column + part.rank] = block
            column += part.rank
        row += size
    alpha = present[0].scale * total if same else float(total)
    if same and len(present) == 1:
        alpha = present[0].alpha
    return AdapterLayer(A=torch.cat([part.A for part in present]), B=B, alpha=alpha)


def split(layer: AdapterLayer, rows: Sequence[int]) -> list[AdapterLayer | None]:
    """Cut a fused layer into its parts; None for a part whose rows of B are all zero.

    A layer that is zero as a whole keeps all its parts.
    """
    blank = not layer.B.any()
    parts: list[AdapterLayer | None] = []
    for B in layer.B.split(list(rows)):
        used = B.flatten(2).any(dim=2).any(dim=0) if B.dim() > 2 else B.any(dim=0)
        if blank or used.all():
            parts.append(AdapterLayer(A=layer.A.clone(), B=B.contiguous(), alpha=layer.alpha))
        elif used.any():
            rank = int(used.sum())
            parts.append(
                AdapterLayer(A=layer.A[used], B=B[:, used].contiguous(), alpha=layer.scale * rank)
            )
        else:
            parts.append(None)
    return parts

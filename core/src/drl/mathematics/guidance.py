"""Classifier-free guidance (Ho and Salimans 2022, arXiv 2207.12598)."""

from __future__ import annotations

from torch import Tensor


def combine(unconditional: Tensor, conditional: Tensor, scale: float) -> Tensor:
    """Return ``u + g (p - u)``, any shape, in the dtype of the predictions.

    The engine combines in the model's dtype; casting here would break bit equality with it.
    """
    return unconditional + scale * (conditional - unconditional)

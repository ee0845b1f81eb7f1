"""Signatures as the source writes them: annotations without the quotes that inspect puts around them."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any


class Bare:
    """An annotation that prints as it is."""

    def __init__(self, text: str) -> None:
        self.text = text

    def __repr__(self) -> str:
        return self.text


def signature_of(function: Callable[..., Any]) -> str:
    """Return the signature in one line, as ``(run: Run, group: Group) -> Dropped | None``."""
    signature = inspect.signature(function)
    parameters = [p.replace(annotation=bare(p.annotation)) for p in signature.parameters.values()]
    return str(
        signature.replace(
            parameters=parameters, return_annotation=bare(signature.return_annotation)
        )
    )


def bare(annotation: Any) -> Any:
    """Return a string annotation in a form that prints without quotes; others unchanged."""
    return Bare(annotation) if isinstance(annotation, str) else annotation

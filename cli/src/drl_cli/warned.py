"""Warnings of the library as one line each on standard error."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager

import click


@contextmanager
def warned() -> Iterator[None]:
    """Print the warnings of a block as messages, without file and line; also when the block fails."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", UserWarning)
        try:
            yield
        finally:
            for text in dict.fromkeys(str(one.message) for one in caught if is_ours(one)):
                click.echo(f"warning: {text}", err=True)


def is_ours(caught: warnings.WarningMessage) -> bool:
    """Say whether a warning is one for users; those for programmers stay out."""
    return caught.category is UserWarning

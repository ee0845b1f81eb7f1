"""A component: a named thing that a plugin offers, known by import path until a recipe picks it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any


class Empty(Mapping[str, Any]):
    """The empty mapping: immutable, hashable (so it can be a field's default) and picklable."""

    def __getitem__(self, key: str) -> Any:
        raise KeyError(key)

    def __iter__(self) -> Iterator[str]:
        return iter(())

    def __len__(self) -> int:
        return 0

    def __hash__(self) -> int:
        return 0

    def __repr__(self) -> str:
        return "{}"


EMPTY: Mapping[str, Any] = Empty()


@dataclass(frozen=True, slots=True)
class Component:
    """What a ``drl_register_*`` hook answers with.

    ``name`` is what a recipe writes (``lower_snake``), ``target`` the ``module:Class`` that is
    imported once a recipe picks it, ``summary`` one sentence, ``config`` the ``module:Options`` of
    its option table (``None``: it has no options), ``facts`` what ``drl config check`` may know
    without importing the class (``has_density``, ``needs`` …), ``slot`` the option a function fills.
    """

    name: str
    target: str
    summary: str = field(kw_only=True)
    config: str | None = field(default=None, kw_only=True)
    facts: Mapping[str, Any] = field(default=EMPTY, kw_only=True)
    slot: str | None = field(default=None, kw_only=True)

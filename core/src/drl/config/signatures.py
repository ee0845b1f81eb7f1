"""Compare a function with the Protocol of its slot: from its source to check, from itself to run."""

from __future__ import annotations

import ast
import importlib
import inspect
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

from drl.dotted import Function
from drl.kinds import SLOT_BY_OPTION


@dataclass(frozen=True, slots=True, kw_only=True)
class Signature:
    """How a function may be called.

    ``positional``: names in order, ``required`` of them without default; ``star`` and ``any_keyword``:
    ``*args`` and ``**kwargs`` are there. ``keywords`` can be given by name only, ``required_keywords``
    must be. ``asynchronous``: an ``async def``.
    """

    positional: tuple[str, ...] = ()
    required: int = 0
    star: bool = False
    keywords: frozenset[str] = frozenset()
    required_keywords: tuple[str, ...] = ()
    any_keyword: bool = False
    asynchronous: bool = False

    def takes(self, keyword: str, after: int) -> bool:
        """True when ``keyword`` can be given by name beside ``after`` positional arguments."""
        return self.any_keyword or keyword in self.keywords or keyword in self.positional[after:]


@cache
def wanted(slot: str) -> Signature:
    """Return how drl calls the function of a slot, from its Protocol; imports no torch."""
    module, _, name = SLOT_BY_OPTION[slot].interface.partition(":")
    protocol = vars(importlib.import_module(module))[name]
    return _without_self(from_callable(protocol.__call__))


def from_source(node: Function) -> Signature:
    """Return the signature that a ``def`` or ``async def`` statement gives."""
    given = node.args
    positional = (*given.posonlyargs, *given.args)
    needed = zip(given.kwonlyargs, given.kw_defaults, strict=True)
    return Signature(
        positional=tuple(argument.arg for argument in positional),
        required=len(positional) - len(given.defaults),
        star=given.vararg is not None,
        keywords=frozenset(argument.arg for argument in given.kwonlyargs),
        required_keywords=tuple(argument.arg for argument, default in needed if default is None),
        any_keyword=given.kwarg is not None,
        asynchronous=isinstance(node, ast.AsyncFunctionDef),
    )


def from_callable(function: Callable[..., Any]) -> Signature:
    """Return the signature of a function or callable object; ValueError when it has none to read."""
    parameters = list(inspect.signature(function).parameters.values())
    positional = [p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    only = [p for p in parameters if p.kind is p.KEYWORD_ONLY]
    kinds = {parameter.kind for parameter in parameters}
    return Signature(
        positional=tuple(parameter.name for parameter in positional),
        required=sum(parameter.default is parameter.empty for parameter in positional),
        star=inspect.Parameter.VAR_POSITIONAL in kinds,
        keywords=frozenset(parameter.name for parameter in only),
        required_keywords=tuple(p.name for p in only if p.default is p.empty),
        any_keyword=inspect.Parameter.VAR_KEYWORD in kinds,
        asynchronous=_is_async(function),
    )


def _is_async(function: Callable[..., Any]) -> bool:
    inner = inspect.unwrap(function)
    if inspect.isroutine(inner):
        return inspect.iscoroutinefunction(inner)
    # of a partial this is the function inside, of another object its class's method
    return inspect.iscoroutinefunction(inner) or inspect.iscoroutinefunction(type(inner).__call__)


def _without_self(signature: Signature) -> Signature:
    return replace(signature, positional=signature.positional[1:], required=signature.required - 1)


def call_text(slot: str) -> str:
    """Return the arguments that a slot gives, as "(run, groups)"; "name=…" is given by name."""
    asked = wanted(slot)
    by_name = (f"{name}=…" for name in sorted(asked.keywords))
    return f"({', '.join((*asked.positional, *by_name))})"


def mismatch(slot: str, path: str, given: Signature) -> str | None:
    """Say why a function does not fit its slot, None when it does; the option's name is left out."""
    asked, calls = wanted(slot), call_text(slot)
    count = len(asked.positional)
    beyond = given.positional[count : given.required]
    if count > len(given.positional) and not given.star:
        takes, names = len(given.positional), ", ".join(given.positional)
        plural = "" if takes == 1 else "s"
        listed = f" ({names})" if names else ""
        return f"{path} takes {takes} argument{plural}{listed}, but is called with {calls}"
    missing = [n for n in (*beyond, *given.required_keywords) if n not in asked.keywords]
    if missing:
        return f"{path} needs the argument {missing[0]!r} too, but is called with {calls}"
    if asked.asynchronous and not given.asynchronous:
        return f"{path} must be async, because drl awaits it: write 'async def'"
    if given.asynchronous and not asked.asynchronous:
        return f"{path} must not be async, because drl does not await it: write 'def'"
    return None

"""The functions that a recipe chooses for its slots, imported once."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from drl.config.signatures import from_callable, wanted
from drl.kinds import SLOT_BY_OPTION, SLOTS

if TYPE_CHECKING:
    from drl.catalog import Catalog


class Functions:
    """The chosen functions of one process, by the option that picks them."""

    def __init__(self, recipe: Any, catalog: Catalog) -> None:
        self._recipe = recipe
        self._catalog = catalog
        self._found: dict[str, Callable[..., Any] | None] = {}

    def get(self, option: str) -> Callable[..., Any] | None:
        """Return the function that the recipe chose for a slot, None when the option is unset.

        It takes every keyword of the slot's Protocol: those that the user's function does not know are
        left out. ContractError when the slot cannot call it, BadInput when it cannot be imported.
        """
        if option not in self._found:
            self._found[option] = self._load(option)
        return self._found[option]

    def load_all(self) -> None:
        """Import every chosen function now, so that a wrong one stops a run before it begins."""
        for slot in SLOTS:
            self.get(slot.option)

    def _load(self, option: str) -> Callable[..., Any] | None:
        section, _, key = SLOT_BY_OPTION[option].option.partition(".")
        name = self._recipe.section(section).__getattribute__(key)
        if name is None:
            return None
        function = _fitted(option, self._catalog.function(option, name))
        return _named(f"raised by {option} = '{name}'", function)


def _fitted(slot: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """Return the function, or one in front of it that leaves out keywords which it does not take."""
    asked, given = wanted(slot), from_callable(function)
    count = len(asked.positional)
    unknown = frozenset(name for name in asked.keywords if not given.takes(name, count))
    if not unknown:
        return function

    @functools.wraps(function)
    def without_unknown(*arguments: Any, **keywords: Any) -> Any:
        kept = {name: value for name, value in keywords.items() if name not in unknown}
        return function(*arguments, **kept)

    return without_unknown


def _named(note: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """Return the function in front of one that notes on an exception whose option it came from."""
    if not inspect.iscoroutinefunction(function):

        @functools.wraps(function)
        def called(*arguments: Any, **keywords: Any) -> Any:
            try:
                return function(*arguments, **keywords)
            except Exception as error:
                error.add_note(note)
                raise

        return called

    @functools.wraps(function)
    async def awaited(*arguments: Any, **keywords: Any) -> Any:
        try:
            return await function(*arguments, **keywords)
        except Exception as error:
            error.add_note(note)
            raise

    return awaited

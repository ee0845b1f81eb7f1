"""The recipe: TOML in, frozen sections out, all problems at once.

Importing this package imports no pydantic; ``load_recipe`` and the classes do.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from drl.config.flags import core_options

if TYPE_CHECKING:
    from drl.catalog import Catalog
    from drl.config.machine import Machine
    from drl.config.recipe import Recipe

__all__ = ["Recipe", "core_options", "load_recipe"]


def load_recipe(
    path: Path | str,
    *,
    sets: Sequence[str] = (),
    override: Path | str | None = None,
    catalog: Catalog,
    machine: Machine | None = None,
) -> Recipe:
    """Return the resolved recipe of a file; RecipeError has all its problems. See ``drl.config.load``."""
    from drl.config.load import load_recipe as load

    return load(path, sets=sets, override=override, catalog=catalog, machine=machine)


def __getattr__(name: str) -> Any:
    if name == "Recipe":
        from drl.config.recipe import Recipe

        return Recipe
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

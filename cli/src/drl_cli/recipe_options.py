"""The arguments that every command with a recipe has."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

RecipeFile = click.Path(exists=True, dir_okay=False, path_type=Path)


def recipe_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add RECIPE, ``--set`` and ``--override`` to a command."""
    for decorate in (
        click.option(
            "--override",
            type=RecipeFile,
            metavar="FILE",
            help="A TOML or YAML file whose values win over the recipe and over --set.",
        ),
        click.option(
            "--set",
            "sets",
            metavar="KEY=VALUE",
            multiple=True,
            help="Change one option: --set sde.num_steps=4. The value is read as TOML, and as plain "
            "text when it is none. Repeatable, in order.",
        ),
        click.argument("recipe", type=RecipeFile),
    ):
        command = decorate(command)
    return command

"""``drl config check``, ``show`` and ``explain``."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import click

from drl_cli.recipe_options import recipe_options
from drl_cli.session import Session


@click.group()
def config() -> None:
    """Check, show and explain recipes. No torch, no weights, no GPU; no code that a recipe names."""


@config.command()
@recipe_options
@click.pass_obj
def check(session: Session, recipe: Path, sets: tuple[str, ...], override: Path | None) -> None:
    """Check a recipe and report all of its problems at once; exit code 2 when it has any.

    \b
    Examples:
      drl config check recipes/quickstart.toml
      drl config check recipes/quickstart.toml --set sde.type=ode
    """
    from drl.config import load_recipe
    from drl.config.render import warning_lines

    resolved = load_recipe(recipe, sets=sets, override=override, catalog=session.catalog)
    for line in warning_lines(resolved.warnings):
        click.echo(line, err=True)
    click.echo(f"{recipe} is valid")


@config.command()
@recipe_options
@click.option("--origin", is_flag=True, help="Also show where each value comes from.")
@click.option("--toml", is_flag=True, help="Write a complete recipe, which can be run as it is.")
@click.pass_obj
def show(
    session: Session,
    recipe: Path,
    sets: tuple[str, ...],
    override: Path | None,
    origin: bool,
    toml: bool,
) -> None:
    """Show every option of a recipe as it would be used, defaults included.

    \b
    Examples:
      drl config show recipes/quickstart.toml --origin
      drl config show recipes/quickstart.toml --toml > complete.toml
    """
    if origin and toml:
        raise click.UsageError("--origin and --toml exclude each other")
    from drl.config import load_recipe

    resolved = load_recipe(recipe, sets=sets, override=override, catalog=session.catalog)
    if toml:
        click.echo(resolved.to_toml(), nl=False)
        return
    for path, value in flattened(resolved.resolved()):
        source = f"\t{resolved.origins.get(path, 'default')}" if origin else ""
        click.echo(f"{path} = {json.dumps(value, ensure_ascii=False, default=str)}{source}")


@config.command()
@click.argument("path")
@click.pass_obj
def explain(session: Session, path: str) -> None:
    """Explain an option (type, default, limits, owner) or a section (its options and plugins).

    \b
    Examples:
      drl config explain algorithm.policy_loss.clip_range
      drl config explain reward
    """
    from drl.config.explain import explain as explain_path

    click.echo(explain_path(path, session.catalog))


def flattened(table: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield dotted path and value of every option, in the order of the table."""
    for key, value in table.items():
        path = f"{prefix}{key}"
        if isinstance(value, Mapping) and value:
            yield from flattened(value, f"{path}.")
        else:
            yield path, value

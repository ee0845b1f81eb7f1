"""``drl plan``."""

from __future__ import annotations

from pathlib import Path

import click

from drl_cli.recipe_options import recipe_options
from drl_cli.session import Session


@click.command()
@recipe_options
@click.pass_obj
def plan(session: Session, recipe: Path, sets: tuple[str, ...], override: Path | None) -> None:
    """Show the batch arithmetic of a recipe: prompts, samples, pairs, windows, micro-batches.

    Nothing is loaded and nothing is written.

    \b
    Examples:
      drl plan recipes/quickstart.toml
      drl plan recipes/quickstart.toml --set rollout.batch_size=16
    """
    from drl.config import load_recipe
    from drl.stages.pairs import batch_plan

    resolved = load_recipe(recipe, sets=sets, override=override, catalog=session.catalog)
    for line in batch_plan(resolved).lines():
        click.echo(line)

"""``drl run``."""

from __future__ import annotations

from pathlib import Path

import click

from drl_cli.named_place import NamedPlace
from drl_cli.recipe_options import recipe_options
from drl_cli.session import Session


@click.command()
@recipe_options
@click.option(
    "--run-dir",
    type=NamedPlace(),
    metavar="DIR",
    help="Where the run keeps its files; runs/<name>-<time> when absent.",
)
@click.option(
    "--resume",
    is_flag=True,
    help="Go on from the newest checkpoint of --run-dir, or of the recipe's newest run.",
)
@click.option(
    "--allow-changed",
    metavar="KEY",
    multiple=True,
    help="With --resume: let this option of the recipe differ from the run's. Repeatable.",
)
@click.option(
    "--trust-checkpoint",
    is_flag=True,
    help="Load a checkpoint of another tool as it is; its metadata can run any program.",
)
@click.option("--dry-run", is_flag=True, help="Check the recipe, print the plan, and stop.")
@click.pass_obj
def run(
    session: Session,
    recipe: Path,
    sets: tuple[str, ...],
    override: Path | None,
    run_dir: Path | None,
    resume: bool,
    allow_changed: tuple[str, ...],
    trust_checkpoint: bool,
    dry_run: bool,
) -> None:
    """Run a recipe.

    Ctrl-C once finishes the iteration, saves, and says how to resume; twice stops at once.

    \b
    Examples:
      drl run recipes/quickstart.toml
      drl run recipes/quickstart.toml --set train.seed=1 --run-dir runs/seed-1
      drl run recipes/quickstart.toml --run-dir runs/seed-1 --resume
    """
    if allow_changed and not resume:
        raise click.UsageError("--allow-changed is about a resumed run; add --resume")
    from drl.launch import run_recipe

    run_recipe(
        recipe,
        sets=sets,
        override=override,
        run_dir=run_dir,
        resume=resume,
        allow_changed=allow_changed,
        trust_checkpoint=trust_checkpoint,
        dry_run=dry_run,
        catalog=session.catalog,
        echo=click.echo,
    )

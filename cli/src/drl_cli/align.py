"""``drl align``."""

from __future__ import annotations

from pathlib import Path

import click

from drl_cli.named_place import NamedPlace
from drl_cli.recipe_options import recipe_options
from drl_cli.session import Session


@click.command()
@recipe_options
@click.option(
    "--rollouts", type=click.IntRange(1, 1000), default=1, show_default=True, help="How many."
)
@click.option(
    "--samples",
    type=click.IntRange(1, 100_000),
    default=16,
    show_default=True,
    help="Samples of each rollout, at least: whole groups, and no more than rollout.batch_size of them.",
)
@click.option(
    "--adapter",
    type=click.Choice(("random", "recipe")),
    default="random",
    show_default=True,
    help="Fresh adapters start at random, so that they change the model, or as the recipe says. Adapters "
    "that the recipe loads are taken as they are.",
)
@click.option(
    "--causes/--no-causes",
    default=True,
    help="Look for the reasons of a difference: the trainer's forward again, one change at a time.",
)
@click.option(
    "--out",
    type=NamedPlace(),
    metavar="DIR",
    help="New folder for the results; runs/<name>-align-<time> when absent.",
)
@click.pass_obj
def align(
    session: Session,
    recipe: Path,
    sets: tuple[str, ...],
    override: Path | None,
    rollouts: int,
    samples: int,
    adapter: str,
    causes: bool,
    out: Path | None,
) -> int:
    """Compare the engine of a recipe with its trainer, on the same weights, step by step.

    The engine samples with the weights that the trainer pushed; the trainer then scores the recorded steps
    as in training. Equal weights and equal arithmetic give differences of exactly 0.0; whatever is above
    makes the ratio of the first update differ from 1. No optimizer step is taken and no reward is asked,
    so a recipe can be probed before its first run. Of a difference the probe looks for the cause: it scores
    the steps again with one thing changed at a time (rows of a forward, dropout, stored latents, schedule,
    guidance, merged adapters, precision, attention kernel, compilation) and says which change removes it.

    The table goes to the terminal, and with a picture into a folder: align.json, align.csv, align.svg.
    Exit code 0 when the largest difference of log-probs is within trust.max_log_prob_diff, 1 when it is
    above, 2 for bad input.

    \b
    Examples:
      drl align recipes/quickstart.toml
      drl align recipes/quickstart.toml --set train.forward_dtype=bf16 --rollouts 2
      drl align recipe.toml --set train.micro_batch_size=1 --out runs/align-1
      drl align recipe.toml --set checkpoint.load=runs/a/checkpoints --adapter recipe
    """
    from drl.align.probe import Wanted, probe
    from drl.align.show import lines, results_of

    found, directory = probe(
        Wanted(
            recipe=recipe,
            sets=sets,
            override=override,
            rollouts=rollouts,
            samples=samples,
            random=adapter == "random",
            causes=causes,
            out=out,
        ),
        session.catalog,
        lambda line: click.echo(line, err=True),
    )
    for line in lines(found):
        click.echo(line)
    click.echo("")
    for path in results_of(directory.path):
        click.echo(path)
    return 0 if found.within else 1

"""``drl plan``."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import click

from drl_cli.recipe_options import recipe_options
from drl_cli.session import Session

OF_THIS_MACHINE = ("cluster.device", "sampling.generator_device")
"""Options whose warnings are of GPUs that this machine lacks."""


@click.command()
@recipe_options
@click.option(
    "--device-name",
    metavar="NAME",
    help="Plan for a card that rates exist for, such as 'NVIDIA H200'; this machine's when left out.",
)
@click.option(
    "--memory",
    metavar="SIZE",
    help="Plan for so much memory, such as 24GiB; the card's own when left out.",
)
@click.option(
    "--gpus",
    metavar="N",
    type=click.IntRange(min=1),
    multiple=True,
    help="Show the batch arithmetic for so many ranks as well: what an update sees stays the same. "
    "Repeatable.",
)
@click.option("--json", "as_json", is_flag=True, help="Write one JSON object instead of tables.")
@click.pass_obj
def plan(
    session: Session,
    recipe: Path,
    sets: tuple[str, ...],
    override: Path | None,
    device_name: str | None,
    memory: str | None,
    gpus: tuple[int, ...],
    as_json: bool,
) -> None:
    """Show what a recipe will need: batch arithmetic, memory by phase, work, seconds, what to change.

    Nothing is loaded and nothing is written: the model is built without weights, and one forward and one
    backward are followed on paper. Memory and work need no GPU. Seconds come from rates that were measured
    on the card: drl bench RECIPE measures them, those of some cards ship with drl. Where the recipe does
    not fit, changes are listed with what each would need, the cheapest first; where it fits, what would be
    faster.

    Seconds are those of one iteration without rewards, encoding of data, parity check, evaluation and
    checkpoint. Memory is what PyTorch's allocator hands out at the worst moment of a phase.

    \b
    Examples:
      drl plan recipes/quickstart.toml
      drl plan recipes/quickstart.toml --set rollout.batch_size=16
      drl plan RECIPE --device-name "NVIDIA H200"
      drl plan RECIPE --memory 24GiB
      drl plan RECIPE --gpus 1 --gpus 4 --gpus 32
    """
    from drl.config import load_recipe
    from drl.config.render import warning_lines
    from drl.errors import BadInput
    from drl.plan.scaling import scaled_lines
    from drl.stages.pairs import batch_plan

    size = None if memory is None else read_size(memory)
    if device_name is not None and not device_name.strip():
        raise BadInput("--device-name: it is empty; name a card, such as 'NVIDIA H200', or cpu")
    on_cpu = device_name is not None and device_name.lower() == "cpu"
    elsewhere = not on_cpu and (device_name is not None or memory is not None)
    if elsewhere or on_cpu:
        # options that follow from the device are those of a card, whatever this machine has
        sets = (f"cluster.device={'cpu' if on_cpu else 'cuda'}", *sets)
    resolved: Any = load_recipe(recipe, sets=sets, override=override, catalog=session.catalog)
    device = resolved.cluster.device
    if device_name is not None and on_cpu != (device == "cpu"):
        raise BadInput(
            f"--device-name {device_name!r} and cluster.device = '{device}' name different devices; leave one out"
        )
    said = [one for one in resolved.warnings if not (elsewhere and one.path in OF_THIS_MACHINE)]
    for line in warning_lines(said):
        click.echo(line, err=True)
    batch = batch_plan(resolved)
    if not as_json:
        for line in [*batch.lines(), *scaled_lines(batch, gpus)]:
            click.echo(line)
    from drl_cli.plan_tables import as_plain, show

    found = predicted(session, resolved, None if on_cpu else device_name, size)
    if as_json:
        click.echo(as_plain(batch, gpus, found))
    else:
        show(found)


def predicted(session: Session, recipe: Any, device_name: str | None, size: int | None) -> Any:
    """Return the prediction, or in words why there is none; BadInput for what the run would refuse."""
    from dataclasses import replace

    from drl.plan.anatomy import NoPlan
    from drl.plan.predict import Card, predict, this_card

    card = this_card(recipe.cluster.device) if device_name is None else Card(name=device_name)
    if size is not None:
        card = replace(card, memory=size)
    try:
        return predict(recipe, session.catalog, card)
    except NoPlan as error:
        return str(error)


def read_size(text: str) -> int:
    """Return bytes: a number above 0 with GiB, GB, MiB or MB; BadInput for anything else."""
    from drl.errors import BadInput

    units = {"gib": 2**30, "gb": 10**9, "mib": 2**20, "mb": 10**6}
    found = re.fullmatch(r"([0-9]{1,9}(?:\.[0-9]*)?)\s*([gm]i?b)", text.strip().lower())
    size = int(float(found[1]) * units[found[2]]) if found else 0
    if size > 0:
        return size
    raise BadInput(f"--memory: {text!r} is no size; write it like 24GiB or 80GB")

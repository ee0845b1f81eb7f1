"""``drl checkpoints``."""

from __future__ import annotations

from pathlib import Path

import click


@click.command()
@click.argument("run_dir", metavar="RUN", type=click.Path(file_okay=False, path_type=Path))
@click.option("--json", "as_json", is_flag=True, help="Write one JSON list instead of a table.")
def checkpoints(run_dir: Path, as_json: bool) -> None:
    """List the checkpoints of a run: size, age, whether every byte is good, and why each stays.

    The star is the one that --resume goes on from. Reads every file of every checkpoint.

    \b
    Examples:
      drl checkpoints runs/quickstart-20260801-120000
      drl checkpoints runs/quickstart-20260801-120000 --json
    """
    import json
    from dataclasses import asdict

    from drl.checkpoint.listing import lines_of, list_checkpoints

    rows = list_checkpoints(run_dir)
    if as_json:
        click.echo(json.dumps([asdict(row) for row in rows], indent=2))
        return
    if not rows:
        click.echo(f"{run_dir} has no checkpoints")
        return
    for line in lines_of(rows):
        click.echo(line)

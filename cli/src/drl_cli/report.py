"""``drl report``."""

from __future__ import annotations

from pathlib import Path

import click


@click.command()
@click.argument("run_dir", type=click.Path(exists=True, file_okay=False, path_type=Path))
def report(run_dir: Path) -> None:
    """Write report.html of a run directory again, from the files of the run.

    \b
    Example:
      drl report runs/quickstart-20260801-120000
    """
    from drl.observe.report import write_report

    click.echo(write_report(run_dir))

"""``drl plugins list``, ``show`` and ``doctor``."""

from __future__ import annotations

import json
import sys
import traceback
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import click

from drl.errors import BadInput, BrokenPlugin, ComponentConflict, ContractError
from drl.kinds import BY_NAME, FUNCTION
from drl_cli.session import Session

if TYPE_CHECKING:
    from drl.catalog import Catalog, Entry, Failure
    from drl.options import Options

KindName = click.Choice(sorted(BY_NAME))


@click.group()
def plugins() -> None:
    """List and examine what the installed plugins offer."""


@plugins.command(name="list")
@click.option("--kind", type=KindName, help="Only components of this kind.")
@click.option("--json", "as_json", is_flag=True, help="Write one JSON object.")
@click.pass_obj
def list_plugins(session: Session, kind: str | None, as_json: bool) -> None:
    """List every component with its owner and version, then the plugins that failed to load.

    Nothing of a component is imported. Without a terminal: one line each, separated by tabs.

    \b
    Examples:
      drl plugins list
      drl plugins list --kind reward
      drl --without drl-reward-ocr plugins list
    """
    catalog = session.catalog
    entries = catalog.entries(kind)
    if as_json:
        click.echo(json.dumps(listing(entries, catalog.failures), indent=2))
    elif sys.stdout.isatty():
        print_tables(entries, catalog.failures)
    else:
        for entry in entries:
            click.echo("\t".join(row(entry)))
        for failure in catalog.failures:
            click.echo("\t".join(("failed", *failed_row(failure))))


@plugins.command()
@click.argument("kind", type=KindName)
@click.argument("name")
@click.pass_obj
def show(session: Session, kind: str, name: str) -> None:
    """Show one component: owner, where it is, how a recipe picks it, its options with defaults.

    \b
    Example:
      drl plugins show reward ocr
      drl plugins show function zero_std
    """
    if kind == FUNCTION:
        show_functions(session.catalog, name)
    else:
        show_component(session.catalog, kind, name)


def show_component(catalog: Catalog, kind: str, name: str) -> None:
    """Print what one component is and which options it has."""
    entry = catalog.find(kind, name)
    kind_row = BY_NAME[kind]
    click.echo(f"{kind} {name}: {entry.component.summary}")
    click.echo(f"  from      {entry.owner}")
    click.echo(f"  class     {entry.component.target}")
    click.echo(f'  chosen by {kind_row.option} = "{name}"')
    for fact, value in sorted(entry.component.facts.items()):
        click.echo(f"  {fact} = {value!r}")
    model = catalog.options_model(kind, name)
    if model is None:
        click.echo("  has no options")
        return
    click.echo(f"  options in [{kind_row.section}.{name}]:")
    for line in option_lines(model):
        click.echo(f"    {line}")


def show_functions(catalog: Catalog, name: str) -> None:
    """Print what a function is, in each slot that has one of this name."""
    from drl.config.signatures import call_text

    catalog.find(FUNCTION, name)  # says which there are when there is none
    for entry in catalog.entries(FUNCTION):
        slot = entry.component.slot
        if entry.component.name == name and slot is not None:
            click.echo(f"function {name}: {entry.component.summary}")
            click.echo(f"  from      {entry.owner}")
            click.echo(f"  function  {entry.component.target}")
            click.echo(f'  chosen by {slot} = "{name}"')
            click.echo(f"  called as {call_text(slot)}")


@plugins.command()
@click.argument("distribution", metavar="[DIST]", required=False)
@click.pass_obj
def doctor(session: Session, distribution: str | None) -> None:
    """Import every component, of one distribution or of all, and say what is wrong.

    Shows the whole traceback of what fails; exit code 1 when anything does.

    \b
    Examples:
      drl plugins doctor
      drl plugins doctor drl-reward-ocr
    """
    from drl.plugins import normalized

    catalog = session.catalog
    wanted = None if distribution is None else normalized(distribution)
    failures = [f for f in catalog.failures if wanted in (None, normalized(f.distribution))]
    entries = [e for e in catalog.entries() if wanted in (None, normalized(e.distribution))]
    if wanted is not None and not failures and not entries:
        owners = {e.distribution for e in catalog.entries()} | {
            f.distribution for f in catalog.failures
        }
        raise BadInput(
            f"'{distribution}' has no plugin installed\n  installed: {', '.join(sorted(owners))}"
        )
    for failure in failures:
        click.echo(f"failed  {failure.owner}, entry point {failure.entry_point}")
        click.echo(indented(failure.error))
    sound = [examine(catalog, entry) for entry in entries]
    if failures or not all(sound):
        raise click.exceptions.Exit(1)


def examine(catalog: Catalog, entry: Entry) -> bool:
    """Print the state of one component; True when nothing is wrong with it."""
    from drl.doctor import complaints

    label = f"{entry.kind} {entry.component.name} of {entry.owner}"
    try:
        found = complaints(catalog, entry)
    except (BrokenPlugin, ContractError, ComponentConflict) as error:
        click.echo(f"failed  {label}")
        click.echo(indented(error))
        return False
    click.echo(f"{'wrong ' if found else 'ok    '}  {label}")
    for complaint in found:
        click.echo(f"    {complaint}")
    return not found


def indented(error: BaseException) -> str:
    """The traceback of an error and its causes, under a heading."""
    text = "".join(traceback.format_exception(error))
    return "\n".join(f"    {line}" for line in text.rstrip().splitlines())


def row(entry: Entry) -> tuple[str, str, str, str, str]:
    """One line of the list."""
    component = entry.component
    summary = component.summary
    if component.slot is not None:
        summary = f"{summary} ({component.slot})"
    return (entry.kind, component.name, entry.distribution, entry.version, summary)


def failed_row(failure: Failure) -> tuple[str, str, str, str]:
    """One line of the list of failures."""
    return (failure.entry_point, failure.distribution, failure.version, failure.reason)


def listing(entries: Sequence[Entry], failures: Sequence[Failure]) -> dict[str, Any]:
    """The list as JSON-able values."""
    heads = ("kind", "name", "distribution", "version", "summary")
    failed_heads = ("entry_point", "distribution", "version", "reason")
    return {
        "components": [
            dict(zip(heads, row(entry), strict=True))
            | {"target": entry.component.target, "slot": entry.component.slot}
            for entry in entries
        ],
        "failures": [dict(zip(failed_heads, failed_row(f), strict=True)) for f in failures],
    }


def print_tables(entries: Sequence[Entry], failures: Sequence[Failure]) -> None:
    """Print components, and below them the plugins that failed, as tables."""
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    console = Console()
    table = Table("kind", "name", "from", "version", "summary", box=None)
    for entry in entries:
        table.add_row(*(escape(cell) for cell in row(entry)))
    console.print(table)
    if failures:
        failed = Table("failed to load", "from", "version", "why", box=None, style="red")
        for failure in failures:
            failed.add_row(*(escape(cell) for cell in failed_row(failure)))
        console.print()
        console.print(failed)
        console.print("see the whole traceback:  drl plugins doctor")


def option_lines(model: type[Options]) -> list[str]:
    """One line per option: name, type, default and help."""
    from pydantic_core import PydanticUndefined

    lines = []
    for name, field in model.model_fields.items():
        default = field.get_default(call_default_factory=True)
        value = "required" if default is PydanticUndefined else f"= {default!r}"
        annotation = field.annotation
        kind = annotation.__name__ if isinstance(annotation, type) else str(annotation)
        lines.append(f"{name} {value}  ({kind})  {field.description or ''}".rstrip())
    return lines

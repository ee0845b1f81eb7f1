"""The ``drl`` command: commands imported on demand, and the one place that turns errors into exit codes.

Exit codes: 0 done, 1 a run failed, 2 bad input, 130 interrupted.
"""

from __future__ import annotations

import gc
import importlib
import os
import sys
import traceback
from collections.abc import Sequence

import click

from drl import __version__
from drl.errors import ContractError, DrlError
from drl.stopping import noted_interrupts
from drl_cli.session import Session

COMMANDS: dict[str, tuple[str, str]] = {
    "run": ("drl_cli.run:run", "Run a recipe, or resume a run."),
    "bench": ("drl_cli.bench:bench", "Time a few iterations of a recipe, phase by phase."),
    "plan": ("drl_cli.plan:plan", "Predict memory, work and seconds of a recipe."),
    "align": ("drl_cli.align:align", "Compare the engine of a recipe with its trainer."),
    "config": ("drl_cli.config:config", "Check, show and explain recipes."),
    "plugins": ("drl_cli.plugins:plugins", "List and examine what the installed plugins offer."),
    "report": ("drl_cli.report:report", "Write the report of a run directory again."),
    "checkpoints": ("drl_cli.checkpoints:checkpoints", "List the checkpoints of a run."),
    "export": ("drl_cli.export:export", "Write trained weights in the format of another tool."),
    "adapters": ("drl_cli.adapters:adapters", "Look at, check, compare and combine adapters."),
    "sample": ("drl_cli.sample:sample", "Generate pictures from fixed seeds."),
}
"""Import path and help line by name, so that ``drl --help`` imports no command."""


class LazyGroup(click.Group):
    """Commands of ``COMMANDS`` by import path, then those that plugins add."""

    def list_commands(self, context: click.Context) -> list[str]:
        """Return drl's own commands in their order of use, then those of plugins."""
        return [*COMMANDS, *sorted(plugin_commands(context))]

    def get_command(self, context: click.Context, name: str) -> click.Command | None:
        """Import one command; plugins are asked only when drl has none of that name."""
        if name in COMMANDS:
            module, _, attribute = COMMANDS[name][0].partition(":")
            command = vars(importlib.import_module(module))[attribute]
            assert isinstance(command, click.Command)
            return command
        return plugin_commands(context).get(name)

    def format_commands(self, context: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the list of commands without importing them."""
        own = [(name, summary) for name, (_, summary) in COMMANDS.items()]
        added = sorted(plugin_commands(context).items())
        theirs = [(name, command.get_short_help_str(60)) for name, command in added]
        with formatter.section("Commands"):
            formatter.write_dl([*own, *theirs])


class Additions(click.Group):
    """What ``drl_add_commands`` gets: refuses a name that is taken."""

    def add_command(self, cmd: click.Command, name: str | None = None) -> None:
        """Add a command; ContractError when drl or another plugin has one of that name."""
        wanted = name or cmd.name
        if wanted in COMMANDS or wanted in self.commands:
            raise ContractError(f"a plugin adds the command 'drl {wanted}', which exists already")
        super().add_command(cmd, name)


def plugin_commands(context: click.Context) -> dict[str, click.Command]:
    """Ask the plugins for their commands."""
    session = context.ensure_object(Session)
    # With --help the group's own body never runs, so its options are read from the context.
    session.without = context.params.get("without") or session.without
    additions = Additions()
    session.catalog.ask("drl_add_commands", {"cli": additions})
    return dict(additions.commands)


@click.group(cls=LazyGroup, context_settings={"help_option_names": ["-h", "--help"]})
@click.option(
    "--without",
    metavar="DIST",
    multiple=True,
    is_eager=True,
    help="Leave out the plugins of a distribution, as if it were not installed. Repeatable; "
    "the variable DRL_PLUGINS_OFF does the same with a list separated by commas.",
)
@click.option("--debug", is_flag=True, is_eager=True, help="Show the traceback of an error.")
@click.version_option(__version__, prog_name="drl")
@click.pass_context
def cli(context: click.Context, without: tuple[str, ...], debug: bool) -> None:
    """Post-train image and video diffusion transformers with reinforcement learning.

    A recipe is a TOML file; every part that it names (model family, engine, reward, loss) is a plugin.

    \b
    Examples:
      drl run recipes/quickstart.toml
      drl config check recipes/quickstart.toml
      drl plugins list
      drl config explain rollout.batch_size
    """
    session = context.ensure_object(Session)
    session.without = without
    session.debug = debug


def run() -> None:
    """Entry point of the console script."""
    # Libraries leave half a million objects that stay. To go through all of them again at each
    # quarter more is a fifth of the time to a first iteration; young ones are seen as often as ever.
    young, middle, _ = gc.get_threshold()
    gc.set_threshold(young, middle, 100)
    sys.exit(execute(sys.argv[1:]))


def execute(arguments: Sequence[str]) -> int:
    """Run one command line and return its exit code; messages go to standard error."""
    session = Session()
    with noted_interrupts() as interrupted:
        try:
            result = cli.main(list(arguments), prog_name="drl", standalone_mode=False, obj=session)
        except click.ClickException as error:
            error.show()
            return error.exit_code
        except (click.Abort, KeyboardInterrupt):
            return say_interrupted()
        except BrokenPipeError:
            # The reader (head, less) has gone; what is still buffered has nowhere to go either.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            return 1
        # A person gets a message, whatever went wrong; the traceback is one option away.
        except Exception as error:
            return say_interrupted() if interrupted() else explain(error, session)
    return result if isinstance(result, int) else 0


def say_interrupted() -> int:
    """Say that a person ended it; return the exit code."""
    click.echo("interrupted", err=True)
    return 130


def explain(error: Exception, session: Session) -> int:
    """Print an error as a message, with a plugin's hint when one knows it; return the exit code."""
    if session.debug:
        traceback.print_exception(error)
    if isinstance(error, DrlError):
        click.echo(str(error), err=True)
    else:
        click.echo(f"internal error: {type(error).__name__}: {error}", err=True)
    for note in vars(error).get("__notes__", ()):
        click.echo(f"  {note}", err=True)
    hint = explanation_of_plugins(error, session)
    if hint:
        click.echo(f"  {hint}", err=True)
    if not isinstance(error, DrlError) and not session.debug:
        click.echo("  for the traceback run it again as:  drl --debug …", err=True)
    return error.exit_code if isinstance(error, DrlError) else 1


def explanation_of_plugins(error: Exception, session: Session) -> str | None:
    """Return what the first plugin says that recognises the error; none is loaded to be asked."""
    if session.loaded is None:
        return None
    try:
        answer = session.loaded.hooks.drl_explain_error(error=error, recipe=None)
    # A hint that fails must not take the place of the error that it was asked about.
    except Exception as failure:
        return f"no hint: {'; '.join([repr(failure), *vars(failure).get('__notes__', ())])}"
    return None if answer is None else str(answer)

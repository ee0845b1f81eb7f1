"""``drl bench``."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from drl_cli.named_place import NamedPlace
from drl_cli.recipe_options import recipe_options
from drl_cli.session import Session

if TYPE_CHECKING:
    from drl.bench.growth import Growth, Varied
    from drl.bench.measure import Bench, Wanted
    from drl.plan.predict import Prediction


@click.command()
@recipe_options
@click.option(
    "--iterations",
    type=click.IntRange(2, 1000),
    default=4,
    show_default=True,
    help="Iterations to run; the first stands apart, because it compiles and warms up.",
)
@click.option(
    "--vary",
    metavar="KEY=V1,V2,…",
    help="Bench several values of one option, and say how far from linear the cost grows.",
)
@click.option(
    "--rewards",
    type=click.Choice(("synthetic", "recipe")),
    default="synthetic",
    show_default=True,
    help="synthetic: numbers that cost nothing; recipe: the recipe's own rewards, timed too.",
)
@click.option(
    "--memory",
    metavar="SIZE",
    help="Allow so much of the card's memory, such as 24GiB: what fails then would not fit there.",
)
@click.option("--compare", is_flag=True, help="Show what drl plan predicts beside the figures.")
@click.option(
    "--record/--no-record",
    default=True,
    show_default=True,
    help="Keep the rates of this machine for drl plan.",
)
@click.option(
    "--run-dir",
    type=NamedPlace(),
    metavar="DIR",
    help="Keep the run's files here; a temporary folder, which is removed, when absent.",
)
@click.option(
    "--json",
    "json_file",
    type=NamedPlace("file"),
    metavar="FILE",
    help="Write the figures into a new file as well.",
)
@click.pass_obj
def bench(
    session: Session,
    recipe: Path,
    sets: tuple[str, ...],
    override: Path | None,
    iterations: int,
    vary: str | None,
    rewards: str,
    memory: str | None,
    compare: bool,
    record: bool,
    run_dir: Path | None,
    json_file: Path | None,
) -> None:
    """Time a few iterations of a recipe: seconds and memory per phase, rates, the driver's share.

    The recipe runs as it is, without evaluation, checkpoints and pictures, and with rewards that cost
    nothing. The rates go to drl plan, which then predicts runs on this machine.

    \b
    Examples:
      drl bench recipes/quickstart.toml
      drl bench recipes/quickstart.toml --set rollout.local.rows=16 --json before.json
      drl bench recipes/quickstart.toml --compare
      drl bench recipes/quickstart.toml --vary rollout.batch_size=2,8,32
    """
    from drl.bench.growth import each_value, varied
    from drl.bench.measure import Wanted
    from drl.bench.places import check_figures, check_rates, check_run_dirs
    from drl_cli.plan import read_size

    if json_file is not None:
        check_figures(json_file)
    if record:
        check_rates()
    wanted = Wanted(
        recipe=recipe,
        sets=sets,
        override=override,
        iterations=iterations,
        run_dir=run_dir,
        rewards=rewards,
        memory=None if memory is None else read_size(memory),
    )

    figures = Figures(json_file)
    if vary is None:
        check_run_dirs([run_dir])
        figures.keep(one_bench(session, wanted, compare=compare, record=record))
    else:
        option = varied(vary)
        check_run_dirs(each.run_dir for each in each_value(option, wanted))
        each_bench(session, option, wanted, compare=compare, record=record, keep=figures.keep)
    figures.end()


class Figures:
    """The file of ``--json``, if any. That it cannot be written costs neither tables nor further benches."""

    def __init__(self, file: Path | None) -> None:
        self.file = file
        self.error: OSError | None = None

    def keep(self, found: Any) -> None:
        """Write the figures so far."""
        from drl.observe.files import write_json_atomic

        if self.file is None:
            return
        try:
            write_json_atomic(self.file, found)
            self.error = None
        except OSError as error:
            self.error = error
            click.echo(f"{self.file} was not written: {error}", err=True)

    def end(self) -> None:
        """Say where the figures are; DrlError when the last ones were not written."""
        from drl.errors import DrlError

        if self.error is not None:
            raise DrlError(f"--json: the figures are not in {self.file}: {self.error}")
        if self.file is not None:
            click.echo(f"figures  {self.file}")


def each_bench(
    session: Session,
    option: Varied,
    wanted: Wanted,
    *,
    compare: bool,
    record: bool,
    keep: Callable[[Any], None],
) -> None:
    """Bench each value; show how cost grows. A value that fails, or Ctrl-C, leaves the figures before it.

    ``keep`` gets the rows so far as plain values, after each bench.
    """
    from drl.bench.growth import each_value, growths
    from drl.bench.measure import bench_recipe

    runs = each_value(option, wanted)
    for each in runs:  # a last value that is wrong must not cost the benches before it
        bench_recipe(each, session.catalog)
    done: list[Done] = []
    try:
        for value, each in zip(option.values, runs, strict=True):
            click.echo(f"\n{option.key}={value}")
            done.append(run_bench(session, each, compare=compare, record=record))
            keep(plain_growths(growths(option, [one.bench for one in done]), done))
    finally:
        if 0 < len(done) < len(runs):
            unfinished = f"{option.key}={option.values[len(done)]}"
            click.echo(f"{unfinished} was not finished; what was measured before it:", err=True)
        if done:
            show_growth(option.key, growths(option, [one.bench for one in done]))
            for value, one in zip(option.values, done, strict=False):
                show_compared(f"{option.key}={value}", one, compare=compare)
            show_rates(done[-1])


def plain_growths(found: Sequence[Growth], done: Sequence[Done]) -> list[dict[str, Any]]:
    """Return the rows of a varied option as plain values, with what was predicted."""
    from drl.bench.table import growth_json

    rows = growth_json(found)
    return [row | predicted(one) for row, one in zip(rows, done, strict=True)]


def one_bench(session: Session, wanted: Wanted, *, compare: bool, record: bool) -> dict[str, Any]:
    """Bench once and show everything; return the figures as plain values."""
    from drl.bench.table import as_json

    done = run_bench(session, wanted, compare=compare, record=record)
    show_bench(done.bench)
    show_compared("drl plan", done, compare=compare)
    show_rates(done)
    return as_json(done.bench) | predicted(done)


def predicted(done: Done) -> dict[str, Any]:
    """Return what was predicted before a bench as plain values; nothing where nothing was."""
    from drl.observe.files import plain

    return {} if done.planned is None else {"predicted": plain(done.planned)}


@dataclass(frozen=True, slots=True, kw_only=True)
class Planned:
    """What was predicted before a bench; ``seconds`` None without rates of this machine."""

    seconds: Mapping[str, float] | None
    peak_bytes: Mapping[str, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class Done:
    """A bench, what was predicted before it, and the file that keeps its rates."""

    bench: Bench
    planned: Planned | None = None
    rates: Path | None = None


def run_bench(session: Session, wanted: Wanted, *, compare: bool, record: bool) -> Done:
    """Predict, measure, and keep the rates."""
    from drl.bench.measure import bench_recipe, measure

    recipe = bench_recipe(wanted, session.catalog)
    prediction = prediction_of(session, recipe) if compare or record else None
    planned = None
    if isinstance(prediction, str):
        made = measure(recipe, wanted, session.catalog, click.echo)
        # only now: what cannot run either has told the reason itself
        click.echo(f"not planned, and no rates are kept: {prediction}", err=True)
        return Done(bench=made)
    if prediction is not None:
        # read now: the rates that this very bench records must not be what it is compared with
        seconds, peaks = prediction.seconds, prediction.peak_bytes
        planned = Planned(
            seconds=None if seconds is None else dict(seconds), peak_bytes=dict(peaks)
        )
    made = measure(recipe, wanted, session.catalog, click.echo)
    if not record or prediction is None:
        return Done(bench=made, planned=planned)
    return Done(bench=made, planned=planned, rates=keep_rates(prediction, made))


def keep_rates(prediction: Prediction, made: Bench) -> Path | None:
    """Keep what a bench taught; None, and a word about it, where that fails: the figures are there all the same."""
    from drl.bench.rates import record
    from drl.errors import DrlError

    try:
        return record(prediction, made)
    except (OSError, DrlError) as error:
        click.echo(f"no rates were kept: {error}", err=True)
        return None


def show_compared(title: str, done: Done, *, compare: bool) -> None:
    """Print what was predicted beside what was measured, where that was asked for and predicted."""
    from drl.bench.table import compared_rows

    plan = done.planned
    if not compare or plan is None:
        return
    rows = compared_rows(done.bench, plan.seconds, plan.peak_bytes)
    show_table((title, "predicted", "measured", "error"), rows)
    if plan.seconds is None:
        click.echo("no seconds are predicted: no rates of this machine were known before")


def show_rates(done: Done) -> None:
    """Say where the rates are kept."""
    if done.rates is not None:
        click.echo(f"\nrates    {done.rates}")


def prediction_of(session: Session, recipe: Any) -> Prediction | str:
    """Return the planner's prediction; the reason in words for a recipe that it cannot plan."""
    from drl.errors import BadInput
    from drl.plan.predict import predict

    try:
        return predict(recipe, session.catalog)
    except BadInput as error:
        return str(error)


def show_bench(made: Bench) -> None:
    """Print the tables of one bench."""
    from drl.bench.table import head_lines, memory_title, phase_rows, speed_rows

    click.echo()
    for line in head_lines(made):
        click.echo(line)
    show_table(("phase", "seconds", "from – to", "share", memory_title(made)), phase_rows(made))
    show_table(("figure", "median"), speed_rows(made))


def show_growth(key: str, found: Sequence[Growth]) -> None:
    """Print how cost grows with an option."""
    from drl.bench.table import COUNTED, GROWTH_TITLES, growth_rows, head_lines

    click.echo()
    click.echo(head_lines(found[0].bench)[0])
    for phase, counted in COUNTED.items():
        rows = growth_rows(found, phase)
        if rows:
            click.echo(f"\n{phase}")
            show_table((key, counted, *GROWTH_TITLES), rows)
    if not any(growth.off for growth in found):
        click.echo("off the line: needs at least three values that change the amount of work")


def show_table(titles: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Print a table: the first column to the left, the others to the right."""
    from rich.markup import escape
    from rich.table import Table

    from drl_cli.wide import wide_console

    table = Table(box=None, pad_edge=False)
    for number, title in enumerate(titles):
        table.add_column(escape(title), justify="right" if number else "left", no_wrap=True)
    for row in rows:
        table.add_row(*(escape(cell) for cell in row))
    click.echo()
    wide_console().print(table)

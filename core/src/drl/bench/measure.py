"""Run a few iterations of a recipe and keep their rows of figures.

The recipe is what a run would do, without what a run does now and then: no evaluation, no checkpoint, no
pictures. The first iteration stands apart: it compiles and warms up.
"""

from __future__ import annotations

import shutil
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from drl.bench.rewards import NAME
from drl.config import load_recipe
from drl.config.environment import training_environment
from drl.deterministic import determinism
from drl.errors import BadInput, RunDirectoryError
from drl.interfaces.logger import Logger, RunFacts
from drl.launch import Start, close, first_iteration, header, loaded, start, write_plugins
from drl.observe.directory import RunDirectory
from drl.observe.files import write_text_atomic
from drl.observe.memory import GIB, memory_of
from drl.observe.performance import medians, settled
from drl.observe.rates_of_run import REWARD_WAIT
from drl.observe.timing import STEP_TIME, TRAIN, UNACCOUNTED, phase_key, phases_of
from drl.plan.predict import this_card
from drl.plan.shortage import shortage
from drl.stopping import AtOnce, StopFlag
from drl.types import Context

if TYPE_CHECKING:
    from drl.catalog import Catalog
    from drl.run import Run

Echo = Callable[[str], None]
SYNTHETIC, OWN = "synthetic", "recipe"
PREFIX = "drl-bench-"
"""Begins the names of temporary folders."""
ROLLOUT = "rollout"
ITERATION, REST = "iteration", "unaccounted"
REWARD, WAIT = "reward", "reward_wait"
BESIDE = {REWARD: phase_key(f"overlapped/{REWARD}"), WAIT: REWARD_WAIT}
"""Seconds of rewards beside the rollout, and of the rollout while it did nothing but wait for them."""
WORK = {ROLLOUT: "perf/images_per_second", TRAIN: "perf/pairs_per_second"}
"""The rate of each phase that has one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    """What to measure. ``rewards``: "synthetic", or "recipe" for the recipe's own.

    ``run_dir`` None: a temporary folder, which is gone afterwards. ``memory``: bytes of the card that may be
    allocated, as on a smaller one; None without a limit.
    """

    recipe: Path
    sets: Sequence[str] = ()
    override: Path | None = None
    iterations: int = 4
    run_dir: Path | None = None
    rewards: str = SYNTHETIC
    memory: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Host:
    """Where it was measured: the card, torch, the forward's dtype, whether the trainer's blocks compile."""

    device: str
    torch: str
    dtype: str
    compiled: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Bench:
    """The figures of a bench by metric name: of the first iteration, and medians over the others.

    ``start_seconds``: from nothing to the first iteration. ``peaks``: the most that was held in each phase
    of any iteration but the first, in GiB; empty where the device does not tell. ``held``: what was held at
    the end of each. ``work``: how many images a rollout made, and how many pairs a training took. ``ranges``:
    seconds of the fastest and of the slowest of the others, by phase and by name of ``BESIDE``.
    """

    name: str
    host: Host
    iterations: int
    start_seconds: float
    first: Mapping[str, float]
    middle: Mapping[str, float]
    peaks: Mapping[str, float] = field(default_factory=dict)
    held: Mapping[str, float] = field(default_factory=dict)
    work: Mapping[str, float] = field(default_factory=dict)
    ranges: Mapping[str, tuple[float, float]] = field(default_factory=dict)

    @property
    def seconds(self) -> dict[str, float]:
        """Return the median seconds of each phase, and of what no phase claims."""
        times = times_of(self.middle)
        times.pop(ITERATION)
        return times

    @property
    def beside(self) -> dict[str, float]:
        """Return the median seconds of rewards by name of ``BESIDE``; they are part of no sum."""
        return beside_of(self.middle)

    @property
    def step_seconds(self) -> float:
        """Return the median seconds of an iteration."""
        return self.middle[STEP_TIME]


class Enough(Exception):
    """Enough iterations were measured: no error, it ends the loop."""


class Rows(Logger):
    """Keeps the rows of a run and ends it after the wanted number, before anything is saved at an end."""

    def __init__(self, wanted: int, echo: Echo) -> None:
        super().__init__(None, Context())
        self.wanted = wanted
        self.echo = echo
        self.rows: list[Mapping[str, float]] = []

    def start(self, run: RunFacts) -> None:
        """Begin with no row."""
        self.rows.clear()

    def metrics(self, step: int, values: Mapping[str, float]) -> None:
        """Take a row; raises Enough after the last one."""
        if step < 0:
            return
        self.rows.append(dict(values))
        self.echo(f"iteration {len(self.rows)}/{self.wanted}: {values[STEP_TIME]:.2f} s")
        if len(self.rows) == self.wanted:
            raise Enough

    def event(self, text: str) -> None:
        """Show what a person should know."""
        self.echo(text)

    def close(self) -> None:
        """Nothing is open."""


def measure(recipe: Any, wanted: Wanted, catalog: Catalog, echo: Echo = print) -> Bench:
    """Run the iterations of a bench's recipe and return their figures. Raises what a run raises."""
    shown = changed(recipe, {"train": {"num_rollout": wanted.iterations}})
    for line in header(shown, catalog):
        echo(line)
    began = time.perf_counter()
    rows = Rows(wanted.iterations, echo)
    with (
        AtOnce() as stop,
        limited(recipe.cluster.device, wanted.memory),
        determinism(recipe) as variables,
        bench_directory(wanted.run_dir) as directory,
        training_environment({**variables, **recipe.train.env}),
    ):
        write_text_atomic(directory.recipe, recipe.to_toml())
        write_plugins(recipe, directory, catalog)
        start_seconds = run_iterations(recipe, catalog, directory, rows, stop) - began
    later = settled(rows.rows)
    return Bench(
        name=recipe.run.name,
        host=host_of(recipe),
        iterations=len(later),
        start_seconds=start_seconds,
        first=rows.rows[0],
        middle=medians(later),
        peaks=largest([memory_of(row, peak=True) for row in later]),
        held=largest([memory_of(row, peak=False) for row in later]),
        work=medians([work_of(row) for row in later]),
        ranges=ranges([times_of(row) | beside_of(row) for row in later]),
    )


def bench_recipe(wanted: Wanted, catalog: Catalog) -> Any:
    """Return the recipe of a bench: the same but for rewards, evaluation, checkpoints, loggers and length."""
    recipe = load_recipe(wanted.recipe, sets=wanted.sets, override=wanted.override, catalog=catalog)
    first = first_iteration(recipe, loaded(recipe, resume=False))
    changes: dict[str, Mapping[str, Any]] = {
        # one more than is measured: a last iteration would save and evaluate
        "train": {"num_rollout": first + wanted.iterations + 1, "num_epoch": None},
        "eval": {"datasets": (), "function": None},
        "checkpoint": {"save_interval": None, "every_minutes": 0.0, "keep_best": 0},
        "logging": {"loggers": ("jsonl",)},
        # files that the recipe names may be those of its runs
        "debug": {"save_rollout_data": None, "save_train_data": None, "dump_details": None},
    }
    rewarded = recipe.reward.all_terms or recipe.reward.custom is not None
    if wanted.rewards == SYNTHETIC and rewarded:
        changes["reward"] = {"type": None, "terms": (), "custom": NAME, "key": None}
    return changed(recipe, changes)


def changed(recipe: Any, changes: Mapping[str, Mapping[str, Any]]) -> Any:
    """Return a recipe with other values, by section and option; what depends on them stays as it was."""
    sections: dict[str, Any] = {
        name: recipe.section(name).model_copy(update=dict(update))
        for name, update in changes.items()
    }
    return replace(recipe, **sections)


@contextmanager
def limited(device: str, memory: int | None) -> Iterator[None]:
    """Let no more of a card be allocated than so many bytes; BadInput where that cannot be had.

    An allocation beyond it fails as on a card of that size, whatever else the card could hold.
    """
    if memory is None:
        yield
        return
    import torch

    if not device.startswith("cuda"):
        raise BadInput(
            "--memory limits a GPU's memory, and this recipe runs on the CPU; leave it out"
        )
    total = torch.cuda.get_device_properties(device).total_memory
    if not 0 < memory <= total:
        raise BadInput(
            f"--memory: {memory / GIB:.1f} GiB asked for, of a card with {total / GIB:.1f} GiB"
        )
    torch.cuda.empty_cache()
    index = torch.device(device).index
    number = torch.cuda.current_device() if index is None else index
    torch.cuda.set_per_process_memory_fraction(memory / total, number)
    try:
        yield
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0, number)


@contextmanager
def bench_directory(chosen: Path | None) -> Iterator[RunDirectory]:
    """Open the run directory of a bench, a temporary one when none was chosen."""
    if chosen is not None:
        with RunDirectory.create_at(chosen) as directory:
            yield directory
        return
    sweep_killed()
    with (
        tempfile.TemporaryDirectory(prefix=PREFIX, ignore_cleanup_errors=True) as folder,
        RunDirectory.create_at(Path(folder) / "run") as directory,
    ):
        yield directory


def sweep_killed() -> None:
    """Remove temporary folders of benches that were killed: they name a holder, and nobody holds them."""
    for path in Path(tempfile.gettempdir()).glob(f"{PREFIX}*/run"):
        with suppress(RunDirectoryError, OSError):  # in use, or somebody else's
            if (path / "lock.json").is_file():
                with RunDirectory.open(path):
                    pass
                shutil.rmtree(path.parent)


def run_iterations(
    recipe: Any, catalog: Catalog, directory: RunDirectory, rows: Rows, stop: StopFlag
) -> float:
    """Build, start and run until ``rows`` has enough; return when the first iteration began."""
    from drl.assemble import assemble
    from drl.cluster.background import Background
    from drl.loop import roll_out, train

    work: Callable[[Run], None] = roll_out if recipe.debug.rollout_only else train
    run = None
    error: BaseException | None = None
    with closing(Background()) as background:
        try:
            run = assemble(recipe, catalog, directory, background)
            run.loggers = [*run.loggers, rows]
            run.stop = stop  # there is nothing to save
            start(run, Start(load=loaded(recipe, resume=False)), rows.echo)
            began = time.perf_counter()
            with suppress(Enough):
                work(run)
        except BaseException as caught:
            error = caught
            short = shortage(caught, recipe, catalog, None if run is None else run.phases.failed)
            if short is not None:
                raise short from caught
            raise
        finally:
            if run is not None:
                close(run, error)
            run = None
            free()
    return began


def free() -> None:
    """Give back what the run held, so that another one starts as this one did."""
    import gc

    import torch

    gc.collect()
    if torch.cuda.is_initialized():
        torch.cuda.empty_cache()
    torch.compiler.reset()


def host_of(recipe: Any) -> Host:
    """Return where a recipe runs."""
    import torch

    return Host(
        device=this_card(recipe.cluster.device).name,
        torch=torch.__version__,
        dtype=recipe.train.forward_dtype,
        compiled=recipe.train.compile,
    )


def work_of(row: Mapping[str, float]) -> dict[str, float]:
    """Return the images and pairs of one row by phase, from its rates and times."""
    times = phases_of(row)
    return {
        phase: float(round(row[rate] * times[phase]))
        for phase, rate in WORK.items()
        if rate in row and phase in times
    }


def times_of(row: Mapping[str, float]) -> dict[str, float]:
    """Return the seconds of each phase, of what no phase claims, and of the whole iteration."""
    return phases_of(row) | {REST: row.get(UNACCOUNTED, 0.0), ITERATION: row[STEP_TIME]}


def beside_of(row: Mapping[str, float]) -> dict[str, float]:
    """Return the seconds of rewards of one row, by name of ``BESIDE``."""
    return {name: row[metric] for name, metric in BESIDE.items() if metric in row}


def ranges(rows: Sequence[Mapping[str, float]]) -> dict[str, tuple[float, float]]:
    """Return the smallest and the largest value of each name."""
    most = largest(rows)
    return {name: (min(row[name] for row in rows if name in row), most[name]) for name in most}


def largest(rows: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Return the largest value of each name."""
    names = dict.fromkeys(name for row in rows for name in row)
    return {name: max(row[name] for row in rows if name in row) for name in names}

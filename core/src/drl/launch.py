"""``run_recipe``: from a recipe file to a finished run directory; also resume and dry run."""

from __future__ import annotations

import errno
import re
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from drl.checkpoint.differences import differences, flat, table
from drl.checkpoint.folders import TRACKER, checkpoints_in, number_of
from drl.config import load_recipe
from drl.config.environment import training_environment
from drl.config.explain import explain
from drl.config.render import warning_lines
from drl.deterministic import determinism
from drl.errors import BadInput, CheckFailed, CheckpointError, DrlError, RunDirectoryError
from drl.interfaces.logger import RunFacts
from drl.model.describe import trainer_lines
from drl.observe.directory import RunDirectory, is_run_directory
from drl.observe.files import write_json_atomic, write_text_atomic
from drl.observe.versions import versions
from drl.plan.shortage import shortage
from drl.stages.ci import check_evaluations
from drl.stages.dump import check_dump_files
from drl.stages.pairs import batch_plan

if TYPE_CHECKING:
    from drl.catalog import Catalog
    from drl.run import Run

Echo = Callable[[str], None]

FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
"""What a system says when a disk, a quota or a limit on files leaves no room."""


def run_recipe(
    path: Path,
    *,
    sets: Sequence[str] = (),
    override: Path | None = None,
    run_dir: Path | None = None,
    resume: bool = False,
    allow_changed: Sequence[str] = (),
    trust_checkpoint: bool = False,
    dry_run: bool = False,
    catalog: Catalog,
    echo: Echo = print,
) -> Path | None:
    """Run a recipe and return its run directory; None after a dry run.

    ``allow_changed``: options in which a resumed run's recipe may differ although an iteration depends on
    them. ``trust_checkpoint``: run whatever the metadata of a checkpoint names.

    Raises BadInput (exit code 2) before anything was written, other DrlErrors for failed runs.
    """
    recipe = in_iterations(
        load_recipe(path, sets=sets, override=override, catalog=catalog), catalog
    )
    for line in header(recipe, catalog):
        echo(line)
    if dry_run:
        return None
    for key in allow_changed:
        explain(key, catalog)  # BadInput for an option that nobody knows
    check_checkpoint_folder(recipe, resume=resume)
    if resume and recipe.debug.rollout_only:
        raise BadInput(
            "--resume: debug.rollout_only keeps nothing to go on from; start a new run, from "
            "train.start_rollout_id on"
        )
    start = Start(resume=resume, load=loaded(recipe, resume=resume), trust=trust_checkpoint)
    if not resume:
        check_dump_files(recipe, first_iteration(recipe, start.load))
    with (
        determinism(recipe) as variables,
        find_directory(recipe, run_dir, resume=resume) as directory,
        training_environment({**variables, **recipe.train.env}),
    ):
        if resume:
            check_same_recipe(recipe, directory, catalog, allow_changed, echo)
        write_text_atomic(directory.recipe, recipe.to_toml())
        write_plugins(recipe, directory, catalog)
        echo(f"run directory {directory.path}   seed {recipe.train.seed}")
        execute(recipe, catalog, directory, start, echo=echo)
    return directory.path


def in_iterations(recipe: Any, catalog: Catalog) -> Any:
    """Return a recipe that knows its number of iterations; one of epochs asks its data for their rows."""
    if recipe.train.num_rollout is not None:
        return recipe
    from drl.stages.start import counted_in_iterations
    from drl.trainers import Maker, rank_context, rank_settings

    context = rank_context(recipe, None, rank_settings(recipe), 0)
    source = Maker(recipe, catalog, context)("data_source", recipe.data.source, "data")
    return counted_in_iterations(recipe, source)


def first_iteration(recipe: Any, load: Path | None) -> int:
    """Return the first iteration of a new run."""
    if recipe.train.start_rollout_id is not None:
        return int(recipe.train.start_rollout_id)
    return 0 if load is None else number_of(load) or 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Start:
    """Where a run starts: at its own newest checkpoint, at another run's (``load``), or at the beginning."""

    resume: bool = False
    load: Path | None = None
    trust: bool = False


def loaded(recipe: Any, *, resume: bool) -> Path | None:
    """Return the whole checkpoint that a new run starts from; a resumed one has its own."""
    from drl.checkpoint.load import check_loadable, find_checkpoint

    chosen, step = recipe.checkpoint.load, recipe.checkpoint.step
    if chosen is None or resume:
        return None
    folder = find_checkpoint(chosen, step)
    check_loadable(folder, recipe)
    return folder


def header(recipe: Any, catalog: Catalog) -> list[str]:
    """Return what a person reads before a run: warnings, what will run, the batch arithmetic."""
    lines = warning_lines(recipe.warnings)
    parts = [recipe.model.family, recipe.algorithm.loss]
    if not recipe.train.train_only:
        rewards = [term.name for term in recipe.reward.all_terms] or [recipe.reward.custom]
        parts += [recipe.rollout.engine, recipe.sde.type, *rewards]
    mode = f"LoRA rank {recipe.lora.rank}" if recipe.lora.enabled else "full weights"
    lines.append(f"{recipe.run.name}: {' + '.join(map(str, parts))}, {mode}")
    plan = batch_plan(recipe).lines()
    details = plan[:1] if recipe.debug.rollout_only else [*plan, *trainer_lines(recipe)]
    lines += [f"  {line}" for line in [*details, *mode_lines(recipe)]]
    lines.append(
        f"  {recipe.train.num_rollout} iterations on {recipe.cluster.device} "
        f"in {recipe.train.forward_dtype}"
    )
    for answer in catalog.hooks.drl_report_header(recipe=recipe):
        lines += [answer] if isinstance(answer, str) else answer or []
    return lines


def mode_lines(recipe: Any) -> list[str]:
    """Say what a run leaves out."""
    debug = recipe.debug
    said = {
        "rollouts only, nothing is trained (debug.rollout_only)": debug.rollout_only,
        "no optimizer step is taken (debug.skip_optimizer_step)": debug.skip_optimizer_step,
        f"rollouts from {debug.load_rollout_data}, no engine": debug.load_rollout_data is not None,
    }
    return [line for line, true in said.items() if true]


def find_directory(recipe: Any, run_dir: Path | None, *, resume: bool) -> RunDirectory:
    """Return a new run directory, or the one to resume; an old one is never written over."""
    root = Path(recipe.run.directory)
    if not resume:
        return (
            RunDirectory.create(root, recipe.run.name)
            if run_dir is None
            else RunDirectory.create_at(run_dir)
        )
    if run_dir is not None:
        return RunDirectory.open(run_dir)
    # names as RunDirectory.create makes them: other recipes, and probes, may have names that begin like this
    mine = re.compile(rf"{re.escape(recipe.run.name)}-\d{{8}}-\d{{6}}(-\d+)?")
    named = [path for path in root.glob("*") if mine.fullmatch(path.name)]
    found = [path for path in named if is_run_directory(path)]
    if not found:
        raise RunDirectoryError(
            f"--resume: there is no run of '{recipe.run.name}' below {root}; "
            "name one with --run-dir, or start without --resume"
        )
    return RunDirectory.open(max(found, key=lambda path: path.stat().st_mtime))


def check_checkpoint_folder(recipe: Any, *, resume: bool) -> None:
    """Refuse a ``checkpoint.save`` that holds another run's checkpoints."""
    chosen = recipe.checkpoint.save
    if chosen is not None and not resume and (Path(chosen) / TRACKER).exists():
        raise BadInput(
            f"checkpoint.save: {chosen} holds the checkpoints of another run; name another folder, or "
            "go on with that run by --resume --run-dir"
        )


def check_same_recipe(
    recipe: Any,
    directory: RunDirectory,
    catalog: Catalog,
    allow_changed: Sequence[str],
    echo: Echo,
) -> None:
    """Show what differs from the run's recipe; refuse what would compute something else unless allowed."""
    if not directory.recipe.is_file():
        if not directory.metrics.exists():
            return  # killed before anything was begun
        raise CheckpointError(f"{directory.path} has no recipe.toml; it cannot be resumed")
    before = flat(load_recipe(directory.recipe, catalog=catalog).resolved())
    free = []
    if recipe.optimizer.lr_decay_style == "constant" and not recipe.optimizer.lr_warmup_fraction:
        free = ["optimizer.lr_decay_iters"]  # derived from num_rollout, and without effect
    found = differences(before, flat(recipe.resolved()), free)
    refused = [one.key for one in found if one.matters and one.key not in allow_changed]
    lines = [f"  {line}" for line in table(found, allow_changed)]
    if refused:
        allow = " ".join(f"--allow-changed {key}" for key in refused)
        raise BadInput(
            f"{directory.path} was made by another recipe:\n"
            + "\n".join(lines)
            + f"\nresume with the same recipe, start a new run, or let it through: {allow}"
        )
    if found:
        echo("changed since the run was last started:")
        for line in lines:
            echo(line)


def write_plugins(recipe: Any, directory: RunDirectory, catalog: Catalog) -> None:
    """Record versions, and which distribution each chosen component comes from."""
    components = [
        {
            "kind": kind,
            "name": name,
            "distribution": catalog.find(kind, name).distribution,
            "version": catalog.find(kind, name).version,
        }
        for kind, name in chosen_components(recipe)
    ]
    write_json_atomic(directory.plugins, versions(catalog.distributions, components))


def chosen_components(recipe: Any) -> list[tuple[str, str]]:
    """Return (kind, name) of every component that the recipe picks by name."""
    chosen = [("family", recipe.model.family), ("loss", recipe.algorithm.loss)]
    chosen += [("data_source", recipe.data.source)]
    if not recipe.train.train_only and recipe.debug.load_rollout_data is None:
        chosen += [
            ("engine", recipe.rollout.engine),
            ("sde_backend", recipe.sde.type),
            ("step_strategy", recipe.sde.step_strategy),
            ("advantage", recipe.algorithm.advantage_estimator),
            *(("reward", term.component) for term in recipe.reward.all_terms),
        ]
    chosen += [("logger", name) for name in recipe.logging.loggers]
    return [(kind, name) for kind, name in chosen if name is not None]


def execute(
    recipe: Any, catalog: Catalog, directory: RunDirectory, where: Start, *, echo: Echo
) -> None:
    """Build, start, train, and always close; hooks hear of the end whatever it was."""
    from drl.assemble import assemble
    from drl.cluster.background import Background
    from drl.finish import finish
    from drl.loop import roll_out, train

    work = roll_out if recipe.debug.rollout_only else train
    run = None
    error: BaseException | None = None
    with closing(Background()) as background:
        try:
            run = assemble(recipe, catalog, directory, background)
            start(run, where, echo)
            work(run)
            for line in finish(run):
                echo(line)
            if (passed := check_evaluations(run)) is not None:
                echo(passed)
        except OSError as caught:
            error = caught
            if caught.errno in FULL:
                raise DrlError(
                    f"the disk is full: {caught}\nmake room there, then go on with --resume"
                ) from caught
            raise
        except BaseException as caught:
            error = caught
            short = shortage(caught, recipe, catalog, None if run is None else run.phases.failed)
            add_way_back(short or caught, run)
            if short is not None:
                raise short from caught
            raise
        finally:
            if run is not None:
                close(run, error)


def add_way_back(error: BaseException, run: Run | None) -> None:
    """Note on an error how the run goes on, when it has something to go on from."""
    told = not isinstance(error, Exception) or "--resume" in str(error)
    told = told or isinstance(error, CheckFailed)  # which comes after the end
    if run is not None and not told and checkpoints_in(run.checkpoints):
        error.add_note(
            "go on from the last checkpoint with: drl run RECIPE --resume --run-dir "
            f"{run.directory.path}"
        )


def start(run: Run, where: Start, echo: Echo) -> None:
    """Tell plugins, restore a checkpoint, start engine and rewards, open loggers, take over Ctrl-C."""
    from drl.assemble import launch_of

    run.hooks.drl_run_started(run=run)
    restore(run, where)
    for remark in run.remarks:
        echo(remark)
    if run.engines is not None:  # rewards score what an engine makes
        run.background.run(run.rewards.start())
        run.background.run(run.rewards.check_golden())
        run.engines.start(launch_of(run))
    facts = RunFacts(
        name=run.recipe.run.name,
        run_dir=run.directory.path,
        recipe=run.recipe.resolved(),
        first=run.first_rollout,
        total=run.recipe.train.num_rollout,
    )
    for logger in run.loggers:
        logger.start(facts)
    if run.first_rollout >= run.recipe.train.num_rollout > 0:
        run.event(f"all {run.recipe.train.num_rollout} iterations are done already")
    run.stop.install(run.event)
    run.phases.start()  # what came so far belongs to no iteration


def restore(run: Run, where: Start) -> None:
    """Bring a run to where it starts."""
    from drl.checkpoint.load import load_options, newest
    from drl.stages.save import read_run_state, tidy

    options = load_options(run.recipe, loads=where.load is not None, trust=where.trust)
    if where.load is not None:
        run.start_from(where.load, read_run_state(where.load), options)
        run.remarks.append(f"starts from {where.load}, after iteration {run.first_rollout}")
        return
    folder = newest(run.checkpoints) if where.resume else None
    if folder is not None and not run.recipe.train.num_rollout:
        raise BadInput(
            f"--resume: train.num_rollout = 0 only evaluates, and {folder.parent} has a checkpoint to go on "
            "from; evaluate it by a new run with checkpoint.load"
        )
    if folder is not None:
        run.restore(folder, read_run_state(folder), options)
        tidy(run)
        return
    run.first_rollout = run.recipe.train.start_rollout_id or 0
    if where.resume:
        run.remarks.append("it was stopped before its first checkpoint: the run starts over")


def end_saving(run: Run, error: BaseException | None) -> None:
    """Wait for the save that is under way: what made the run end does not cost its last checkpoint."""
    from drl.stages.save import settle

    try:
        settle(run, wait=True)
    except DrlError as failure:
        if error is None or isinstance(error, OSError):  # of the same full disk
            raise
        run.event(str(failure))


def close(run: Run, error: BaseException | None) -> None:
    """Close everything that was started; a second failure never hides the first."""
    run.stop.uninstall()
    steps: list[Callable[[], object]] = [
        lambda: end_saving(run, error),
        lambda: run.hooks.drl_run_finished(run=run, error=error),
        *(logger.close for logger in run.loggers),
        lambda: run.background.run(run.rewards.close()),
        run.trainer.close,
    ]
    if run.engines is not None:
        steps.append(run.engines.close)
    failures: list[Exception] = []
    for step in steps:
        try:
            step()
        except Exception as failure:  # whatever it is, the rest must be closed too
            failures.append(failure)
    if failures and (error is None or isinstance(error, OSError)):
        raise failures[0] from error

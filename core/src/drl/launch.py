"""``run_recipe``: from a recipe file to a finished run directory; also resume and dry run."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Any

from drl.config import load_recipe
from drl.config.render import warning_lines
from drl.errors import BadInput, CheckpointError, RunDirectoryError
from drl.interfaces.logger import RunFacts
from drl.observe.directory import RunDirectory, is_run_directory
from drl.observe.files import write_json_atomic, write_text_atomic
from drl.observe.versions import versions
from drl.stages.pairs import batch_plan
from drl.stages.save import TRACKER

if TYPE_CHECKING:
    from drl.catalog import Catalog
    from drl.run import Run

Echo = Callable[[str], None]

MAY_CHANGE = ("run.", "logging.", "checkpoint.", "eval.", "train.num_rollout", "cluster.")
"""Options that a resumed run may have changed: they do not change what an iteration computes."""


def run_recipe(
    path: Path,
    *,
    sets: Sequence[str] = (),
    override: Path | None = None,
    run_dir: Path | None = None,
    resume: bool = False,
    dry_run: bool = False,
    catalog: Catalog,
    echo: Echo = print,
) -> Path | None:
    """Run a recipe and return its run directory; None after a dry run.

    Raises BadInput (exit code 2) before anything was written, other DrlErrors for failed runs.
    """
    recipe = load_recipe(path, sets=sets, override=override, catalog=catalog)
    for line in header(recipe, catalog):
        echo(line)
    if dry_run:
        return None
    check_checkpoint_folder(recipe, resume=resume)
    directory = find_directory(recipe, run_dir, resume=resume)
    with directory:
        if resume:
            check_same_recipe(recipe, directory, catalog)
        write_text_atomic(directory.recipe, recipe.to_toml())
        write_plugins(recipe, directory, catalog)
        echo(f"run directory {directory.path}   seed {recipe.train.seed}")
        execute(recipe, catalog, directory, resume=resume, echo=echo)
    return directory.path


def header(recipe: Any, catalog: Catalog) -> list[str]:
    """Return what a person reads before a run: warnings, what will run, the batch arithmetic."""
    lines = warning_lines(recipe.warnings)
    parts = [recipe.model.family, recipe.algorithm.loss]
    if not recipe.train.train_only:
        rewards = [term.name for term in recipe.reward.all_terms]
        parts += [recipe.rollout.engine, recipe.sde.type, *rewards]
    mode = f"LoRA rank {recipe.lora.rank}" if recipe.lora.enabled else "full weights"
    lines.append(f"{recipe.run.name}: {' + '.join(map(str, parts))}, {mode}")
    lines += [f"  {line}" for line in batch_plan(recipe).lines()]
    lines.append(
        f"  {recipe.train.num_rollout} iterations on {recipe.cluster.device} "
        f"in {recipe.train.forward_dtype}"
    )
    for answer in catalog.hooks.drl_report_header(recipe=recipe):
        lines += [answer] if isinstance(answer, str) else answer or []
    return lines


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
    found = [path for path in root.glob(f"{recipe.run.name}-*") if is_run_directory(path)]
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


def check_same_recipe(recipe: Any, directory: RunDirectory, catalog: Catalog) -> None:
    """Refuse to resume under a recipe that would compute something else."""
    if not directory.recipe.is_file():
        raise CheckpointError(f"{directory.path} has no recipe.toml; it cannot be resumed")
    before = flat(load_recipe(directory.recipe, catalog=catalog).resolved())
    now = flat(recipe.resolved())
    free: tuple[str, ...] = MAY_CHANGE
    if recipe.optimizer.lr_decay_style == "constant" and not recipe.optimizer.lr_warmup_fraction:
        free = (*free, "optimizer.lr_decay_iters")  # derived from num_rollout, and without effect
    changed = [
        f"  {key}: was {before.get(key)!r}, is {now.get(key)!r}"
        for key in sorted(before.keys() | now.keys())
        if before.get(key) != now.get(key) and not key.startswith(free)
    ]
    if changed:
        raise BadInput(
            f"{directory.path} was made by another recipe:\n"
            + "\n".join(changed)
            + "\nresume with the same recipe, or start a new run"
        )


def flat(values: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return nested tables as one table of dotted keys."""
    result: dict[str, Any] = {}
    for key, value in values.items():
        if isinstance(value, dict):
            result |= flat(value, f"{prefix}{key}.")
        else:
            result[f"{prefix}{key}"] = value
    return result


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
    if not recipe.train.train_only:
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
    recipe: Any, catalog: Catalog, directory: RunDirectory, *, resume: bool, echo: Echo
) -> None:
    """Build, start, train, and always close; hooks hear of the end whatever it was."""
    from drl.assemble import assemble
    from drl.cluster.background import Background
    from drl.finish import finish
    from drl.loop import train

    run = None
    error: BaseException | None = None
    with closing(Background()) as background:
        try:
            run = assemble(recipe, catalog, directory, background)
            start(run, resume=resume)
            train(run)
            for line in finish(run):
                echo(line)
        except BaseException as caught:
            error = caught
            raise
        finally:
            if run is not None:
                close(run, error)


def start(run: Run, *, resume: bool) -> None:
    """Tell plugins, restore a checkpoint, start engine and rewards, open loggers, take over Ctrl-C."""
    from drl.assemble import launch_of
    from drl.stages.save import latest, read_run_state

    run.hooks.drl_run_started(run=run)
    if resume:
        folder = latest(run.checkpoints)
        run.restore(folder, read_run_state(folder))
    run.background.run(run.rewards.start())
    run.background.run(run.rewards.check_golden())
    if run.engines is not None:
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
    if run.first_rollout >= run.recipe.train.num_rollout:
        run.event(f"all {run.recipe.train.num_rollout} iterations are done already")
    run.stop.install(run.event)
    run.phases.start()  # what came so far belongs to no iteration


def close(run: Run, error: BaseException | None) -> None:
    """Close everything that was started; a second failure never hides the first."""
    run.stop.uninstall()
    steps: list[Callable[[], object]] = [
        lambda: run.hooks.drl_run_finished(run=run, error=error),
        *(logger.close for logger in run.loggers),
        lambda: run.background.run(run.rewards.close()),
    ]
    if run.engines is not None:
        steps.append(run.engines.close)
    failures: list[Exception] = []
    for step in steps:
        try:
            step()
        except Exception as failure:  # whatever it is, the rest must be closed too
            failures.append(failure)
    if failures and error is None:
        raise failures[0]

"""``Run``: what one training run holds, and the small things that stages ask of it."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from drl.checkpoint.adapters import write_adapters
from drl.checkpoint.saver import Saver
from drl.checkpoint.state import RESUME, RestoreOptions
from drl.collector import LongLived
from drl.errors import CheckpointError, ContractError, DataError
from drl.interfaces.family import Family, Pipeline
from drl.interfaces.loss import Loss
from drl.observe.files import read_json_lines, write_json_atomic
from drl.observe.lanes import record_timeline
from drl.observe.rates_of_run import RunRates
from drl.observe.summary import parity_metrics
from drl.stages.dump import dump_evaluation
from drl.stages.evaluate import BEFORE, EvaluationSet, evaluate_if_due, evaluation_rows
from drl.stages.figures import alarms, training_figures
from drl.stages.records import Records
from drl.stages.residence import Residence
from drl.stages.rollout_figures import rollout_figures
from drl.stages.save import finish_saving, keep_checkpoint, keep_if_best, leave
from drl.stages.start import chosen_start
from drl.stages.sync import SyncLog
from drl.stopping import StopFlag
from drl.types import (
    Advantages,
    Context,
    EvaluationReport,
    Need,
    ParityReport,
    Role,
    Rollout,
    Sample,
    Sampling,
    StepContext,
    StepReport,
    Verdict,
)

if TYPE_CHECKING:
    from torch import Tensor

    from drl.catalog import Catalog
    from drl.cluster.background import Background
    from drl.cluster.encoders import InlineEncoders
    from drl.cluster.engines import InlineEngines
    from drl.cluster.ranks import RankedTrainer
    from drl.cluster.rewards import InlineRewards
    from drl.functions import Functions
    from drl.interfaces.advantage import AdvantageEstimator
    from drl.interfaces.data import DataSource
    from drl.interfaces.logger import Logger
    from drl.interfaces.steps import StepStrategy
    from drl.model.build import Component
    from drl.model.idle import Idle
    from drl.model.trainer import Trainer
    from drl.observe.directory import RunDirectory
    from drl.observe.timing import Phases


PICTURES = 24
"""Pictures kept of each evaluation, and of each rollout with a checkpoint."""


@dataclass(slots=True)
class Counters:
    """What counts monotonically over a run and its resumes."""

    next_group: int = 0
    images_seen: int = 0


@dataclass(slots=True, kw_only=True)
class Run:
    """Everything a run consists of. Built by ``drl.assemble``, used by ``drl.loop`` and the stages."""

    recipe: Any
    catalog: Catalog
    functions: Functions
    directory: RunDirectory
    background: Background
    phases: Phases
    context: Context
    family: Family
    pipeline: Pipeline | None
    loss: Loss
    components: Mapping[str, Component]
    trainer: Trainer | RankedTrainer | Idle
    source: DataSource
    engines: InlineEngines | None
    rewards: InlineRewards
    advantage: AdvantageEstimator | None
    strategy: StepStrategy | None
    loggers: Sequence[Logger]
    evaluation_sets: Sequence[EvaluationSet] = ()
    ranks: int = 1
    first_rollout: int = 0
    version: int = 0
    parity: ParityReport | None = None
    counters: Counters = field(default_factory=Counters)
    syncs: SyncLog = field(default_factory=SyncLog)
    stop: StopFlag = field(default_factory=StopFlag)
    last_save: float = field(default_factory=time.monotonic)
    encoders: InlineEncoders | None = None
    records: Records = field(default_factory=Records)
    residence: Residence = field(default_factory=Residence)
    rates: RunRates = field(default_factory=RunRates)
    long_lived: LongLived = field(default_factory=LongLived)
    row: dict[str, float] = field(default_factory=dict)
    steps: list[StepReport] = field(default_factory=list)
    schedules: dict[Sampling, Tensor] = field(default_factory=dict)
    current: int = 0
    owed: Mapping[str, float] | None = None
    saved: int = -1
    saver: Saver = field(default_factory=Saver)
    remarks: list[str] = field(default_factory=list)
    ending: str = ""

    @property
    def hooks(self) -> Any:
        """The hook relay of the loaded plugins."""
        return self.catalog.hooks

    @property
    def needs_rollout(self) -> bool:
        """True when the loss trains on generated samples."""
        return Need.ROLLOUT in self.loss.needs

    @property
    def checkpoints(self) -> Path:
        """Where checkpoints go: ``checkpoint.save``, or the run directory."""
        chosen = self.recipe.checkpoint.save
        return self.directory.checkpoints if chosen is None else Path(chosen)

    def rollout_ids(self) -> Iterator[int]:
        """Yield the iterations to do; ends early when the user or a verdict asked for it."""
        if self.owed is not None and self.ending:
            return  # the verdict on the iteration that a kill had left without its evaluation
        for rollout_id in range(self.first_rollout, self.recipe.train.num_rollout):
            self.current = rollout_id
            self.row, self.steps = {}, []
            yield rollout_id
            if self.is_last(rollout_id):
                finish_saving(self)
                return
            if self.stop.asked:
                leave(self, rollout_id)

    def is_last(self, rollout_id: int) -> bool:
        """True when the run ends well after this iteration: all are done, or a verdict said so."""
        return bool(self.ending) or rollout_id + 1 == self.recipe.train.num_rollout

    def turn(self, role: Role) -> AbstractContextManager[None]:
        """Time one half of an iteration."""
        return self.phases.phase("rollout" if role is Role.ROLLOUT else "train")

    def step_context(self, rollout_id: int) -> StepContext:
        """Return the context of a loss's ``expand``."""
        section = self.recipe.algorithm
        return StepContext.within(self.context, section=section, rollout_id=rollout_id)

    def schedule(self, sampling: Sampling) -> Tensor | None:
        """Return the trainer's own sigma table for these settings; None without a pipeline."""
        if self.pipeline is None:
            return None
        if sampling not in self.schedules:
            self.schedules[sampling] = self.pipeline.sigmas(sampling)
        return self.schedules[sampling]

    def progress(self, phase: str, done: int, total: int) -> None:
        """Tell loggers how far the current phase is."""
        for logger in self.loggers:
            logger.phase(self.current, phase, done, total)

    def event(self, text: str) -> None:
        """Tell loggers one line that a person should read."""
        for logger in self.loggers:
            logger.event(text)

    def take_step(self, report: StepReport) -> None:
        """Keep the report of one optimizer step, tell plugins, and say when it was skipped."""
        self.steps.append(report)
        if report.skipped:
            self.event(f"optimizer step {report.global_step} skipped: {report.skipped}")
        self.hooks.drl_step_finished(run=self, report=report)

    def take_verdict(self, verdict: Verdict, done: int) -> None:
        """Follow the verdict on ``done`` iterations: end the run well, or keep their checkpoint."""
        self.event(f"verdict '{verdict.action}': {verdict.reason}")
        if verdict.action == "stop":
            self.ending = verdict.reason or "stop"
        elif verdict.action != "keep":
            raise ContractError(f"a verdict is 'keep' or 'stop', got '{verdict.action}'")
        elif done > 0:  # before training there is nothing to keep
            keep_checkpoint(self, done - 1, verdict.reason)

    def take_rollout(
        self, rollout_id: int, rollout: Rollout, advantages: Advantages | None
    ) -> None:
        """Put the figures of a trained iteration into its row; the checkpoint keeps them too."""
        row = self.row
        row |= training_figures(self.steps)
        row |= rollout_figures(rollout, advantages)
        for line in alarms(row):
            self.event(line)
        if self.parity is not None and rollout_id == self.first_rollout:
            row |= parity_metrics(self.parity)
        row["rollout/images_seen"] = float(self.counters.images_seen)

    def finish_iteration(self, rollout_id: int, rollout: Rollout) -> None:
        """Add where the time went, and log the iteration as one row, in one place."""
        self.long_lived.settle()
        for name, seconds in rollout.seconds.items():
            self.phases.overlap(name, seconds, rollout.spans.get(name, ()))
        self.row |= self.phases.finish()
        self.row |= self.rates.figures(self, rollout, self.row, self.phases.timeline)
        record_timeline(self.directory.path, rollout_id, self.phases.timeline)
        self.log_row(rollout_id)
        for logger in self.loggers if rollout.logged else ():
            logger.samples(rollout_id, rollout.samples)
        if self.saved == rollout_id:
            label = f"rollout-{rollout_id + 1:07d}"
            save_pictures(self.directory, label, {"rollout": rollout.samples})

    def log_row(self, rollout_id: int) -> None:
        """Give the row of an iteration to every logger."""
        for logger in self.loggers:
            logger.metrics(rollout_id, finite(self.row))

    def finish_interrupted(self) -> None:
        """Do what a killed run still owed the iteration of its checkpoint: evaluation and row."""
        if self.owed is None:
            return
        rollout_id = self.first_rollout - 1
        self.current, self.row = rollout_id, dict(self.owed)
        evaluate_if_due(self, rollout_id)
        self.row |= self.phases.finish()
        self.log_row(rollout_id)

    def keep_evaluation(self, report: EvaluationReport, label: str) -> None:
        """Log the means of an evaluation and keep its rows for the summary."""
        figures = {f"eval/{name}": mean for name, mean in report.means.items()}
        shown = {**(figures if report.logged else {}), **report.metrics}
        for name, mean in report.means.items() if report.logged else ():
            self.event(f"eval {label}: {name} {mean:.4f} over {len(report.samples[name])} images")
        if label == BEFORE:
            for logger in self.loggers:
                logger.metrics(-1, shown)  # a row of its own: nothing was trained yet
        else:
            self.row |= shown
        write_json_atomic(
            self.evaluations / f"{label}.json",
            {
                "rollout_id": report.rollout_id,
                "means": report.means,
                "metrics": report.metrics,
                "rows": evaluation_rows(report),
            },
        )
        save_pictures(self.directory, label, report.samples)
        dump_evaluation(self, report)
        keep_if_best(self, report.rollout_id, figures)

    @property
    def evaluations(self) -> Path:
        """Folder of the rows of each evaluation."""
        folder = self.directory.path / "evaluations"
        folder.mkdir(exist_ok=True)
        return folder

    def state(self, rollout_id: int) -> dict[str, Any]:
        """Return what a checkpoint must hold besides the trainer's own state."""
        saved = self.catalog.ask("drl_save_state", {"run": self})
        for distribution, state in saved:
            check_json(distribution, state)
        return {
            "rollout_id": rollout_id,
            "next_rollout_id": rollout_id + 1,
            "counters": asdict(self.counters),
            "data_source": self.recipe.data.source,
            "data": self.source.state(),
            "plugins": dict(saved),
            "row": finite(self.row),
        }

    def restore(
        self, folder: Path, state: Mapping[str, Any], options: RestoreOptions = RESUME
    ) -> None:
        """Go to the position of a checkpoint of this run; the next iteration is the one after it."""
        self._go_to(folder, state, options)
        self.source.restore(state["data"])
        self.saved = self.first_rollout - 1
        if not is_logged(self.directory, self.first_rollout - 1):
            self.owed = state["row"]
        self.hooks.drl_restore_state(run=self, state=state["plugins"])

    def start_from(self, folder: Path, state: Mapping[str, Any], options: RestoreOptions) -> None:
        """Start a new run at the position of another run's checkpoint; other data begin anew."""
        self._go_to(folder, state, options)
        state = chosen_start(self, folder, state)
        source = self.recipe.data.source
        try:
            if state["data_source"] != source:
                raise DataError(f"data.source was '{state['data_source']}' and is '{source}'")
            if state["data"] is None:
                raise DataError(f"there is no checkpoint of iteration {self.first_rollout}")
            self.source.restore(state["data"])
        except DataError as error:
            reason = str(error).splitlines()[0]
            self.remarks.append(f"the data begin anew, not where the checkpoint was: {reason}")
        self.hooks.drl_restore_state(run=self, state=state["plugins"])

    def _go_to(self, folder: Path, state: Mapping[str, Any], options: RestoreOptions) -> None:
        first = self.trainer.restore(folder, options)
        if first != state["next_rollout_id"]:
            raise CheckpointError(f"{folder}: trainer and run disagree on the next iteration")
        self.first_rollout = first
        self.remarks += self.trainer.remarks
        self.counters = Counters(**state["counters"])

    def save_adapter(self) -> None:
        """Write the adapters in PEFT and diffusers form and load them; several components get a folder each."""
        write_adapters(
            self.trainer.adapters(),
            self.directory.adapter,
            base_model=self.recipe.model.checkpoint,
        )


def check_json(distribution: str, state: object) -> None:
    """Raise ContractError, which names the plugin, for a state that no checkpoint can hold."""
    try:
        json.dumps(state)
    except (TypeError, ValueError) as error:
        raise ContractError(
            f"{distribution}: drl_save_state must return values that JSON can hold: {error}"
        ) from error


def finite(row: Mapping[str, float]) -> dict[str, float]:
    """Return the figures that are numbers."""
    return {name: float(value) for name, value in row.items() if math.isfinite(value)}


def is_logged(directory: RunDirectory, rollout_id: int) -> bool:
    """True when metrics.jsonl has the row of an iteration, or when the run keeps no such file."""
    if not directory.metrics.is_file():
        return True
    rows, _ = read_json_lines(directory.metrics)
    return any(row.get("step") == rollout_id for row in rows)


def save_pictures(
    directory: RunDirectory, label: str, samples: Mapping[str, Sequence[Sample]]
) -> None:
    """Save the first pictures of the first set, for the report."""
    from drl.observe.pictures import save_samples

    first = next(iter(samples.values()), ())
    shown = [sample for sample in first if sample.media is not None][:PICTURES]
    if shown:
        save_samples(directory.samples / label, shown, rows=4)

"""How fast an iteration was: rates by metric name, from its times and from the work that it did."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from drl.observe.lanes import joined, shared_seconds
from drl.observe.peaks import published_peak
from drl.observe.timing import EVALUATION, STEP_TIME, TRAIN, UNACCOUNTED, phase_key, phases_of
from drl.observe.work import WorkCounter
from drl.stages.rollout import training_sampling

if TYPE_CHECKING:
    from drl.model.compiled import Compilations
    from drl.observe.timing import Timeline
    from drl.observe.work import Rows
    from drl.run import Run
    from drl.types import Rollout, Shard

ROLLOUT = "rollout"
WORK = frozenset({ROLLOUT, TRAIN, EVALUATION, "update_weights", "save_block", "encode", "offload"})
"""Phases that are work of a run's parts; the time of all others is the driver's own."""

PER_SECOND = {"images": "perf/images_per_second", "pairs": "perf/pairs_per_second"}
FILLER = "perf/filler_rows"
ROLLOUT_FILLER = "perf/rollout_filler_rows"
RECOMPILATIONS = "perf/recompilations"
FILLER_ROWS = "filler_rows"
"""Count of an engine: rows that it computed to fill up a forward."""
UNNEEDED = "recompilations"
"""Count of an engine or a trainer: graphs that fixed shapes should have made needless."""

DRIVER_SHARE = "perf/driver_share"
REWARD_WAIT = "perf/reward_wait_seconds"


@dataclass(slots=True)
class Trained:
    """What the shards of an iteration hold: ``pairs`` with a weight, by component and size of their row.

    ``rescored``: those in windows after the first. ``filler``: rows without weight that are computed all
    the same. ``unknown``: pairs whose size is not known.
    """

    pairs: Rows = field(default_factory=Counter)
    rescored: Rows = field(default_factory=Counter)
    filler: int = 0
    unknown: int = 0

    @property
    def count(self) -> int:
        """Pairs with a weight."""
        return self.pairs.total() + self.unknown


@dataclass(slots=True)
class RunRates:
    """Turns times and work into rates, one iteration after another.

    ``take_shards`` notes what is trained on, all ranks together; ``figures`` ends the iteration. What a
    family or a device does not tell is left out, never 0.
    """

    trained: Trained = field(default_factory=Trained)
    counter: WorkCounter | None = None
    peak_tflops: float | None = None
    _graphs: float = 0.0
    _rollout_filler: float | None = None

    @contextmanager
    def rollout(self, run: Run) -> Iterator[None]:
        """Count the filler rows of what is sampled in this context; those of evaluations are not its own."""
        before = engine_counts(run)
        yield
        after = engine_counts(run).get(FILLER_ROWS)
        self._rollout_filler = None if after is None else after - before.get(FILLER_ROWS, 0.0)

    def take_shards(self, run: Run, shards: Sequence[Shard]) -> None:
        """Count the pairs of an iteration over all ranks; nothing on a device is looked at."""
        counter = self._counter(run)
        found = Trained()
        for shard in shards:
            for number, window in enumerate(shard.windows):
                if shard.window_weights[number] == 0:
                    continue  # has no forward at all
                for pair in (pair for batch in window for pair in batch):
                    shape = counter.shape_of(pair)
                    if not pair.weight:
                        found.filler += 1
                    elif shape is None:
                        found.unknown += 1
                    else:
                        found.pairs[pair.component, shape] += 1
                        if number and run.loss.recomputes_old_log_prob:
                            found.rescored[pair.component, shape] += 1
        self.trained = found

    def figures(
        self, run: Run, rollout: Rollout, times: Mapping[str, float], timeline: Timeline
    ) -> dict[str, float]:
        """Return the rates of an iteration whose phases took ``times``; begins the next."""
        spent = phases_of(times)
        figures = self._rollout_rates(run, rollout, spent.get(ROLLOUT, 0.0))
        figures |= self._training_rates(run, spent.get(TRAIN, 0.0))
        figures |= shares(times, timeline)
        figures |= self._new_counts(run)
        self.trained = Trained()
        return figures

    def _rollout_rates(self, run: Run, rollout: Rollout, seconds: float) -> dict[str, float]:
        if run.engines is None or seconds <= 0:
            return {}
        figures = {PER_SECOND["images"]: len(rollout.samples) / seconds}
        return figures | self._speed(
            ROLLOUT, self._counter(run).samples(rollout.samples), seconds, 1
        )

    def _training_rates(self, run: Run, seconds: float) -> dict[str, float]:
        trained = self.trained
        if not trained.count or seconds <= 0:
            return {}
        figures = {PER_SECOND["pairs"]: trained.count / seconds, FILLER: float(trained.filler)}
        if trained.unknown:
            return figures
        counter = self._counter(run)
        work = counter.pairs(trained.pairs, trained.rescored)
        for component in counter.new_late_adapters():
            run.event(
                f"no TFLOP/s of training are reported: nothing up to the first block of '{component}' is trained, "
                "so the backward pass ends before it, and what the family counts is a pass through all blocks"
            )
        return figures | self._speed(TRAIN, work, seconds, run.ranks)

    def _speed(
        self, phase: str, work: float | None, seconds: float, devices: int
    ) -> dict[str, float]:
        """Return TFLOP/s of a phase, and their share of what its devices promise."""
        if work is None:
            return {}
        speed = work / seconds / 1e12
        figures = {tflops_key(phase): speed}
        if self.peak_tflops is not None:
            figures[mfu_key(phase)] = speed / (devices * self.peak_tflops)
        return figures

    def _new_counts(self, run: Run) -> dict[str, float]:
        """Return the rollout's filler rows, and the graphs of engine and trainer since the iteration before."""
        figures = {} if self._rollout_filler is None else {ROLLOUT_FILLER: self._rollout_filler}
        engine, trainer = engine_counts(run).get(UNNEEDED), compilations_of(run.trainer)
        if engine is None and trainer is None:
            return figures
        graphs = (engine or 0.0) + (0 if trainer is None else trainer.unexpected)
        figures[RECOMPILATIONS] = graphs - self._graphs
        self._graphs = graphs
        return figures

    def _counter(self, run: Run) -> WorkCounter:
        if self.counter is None:
            self.peak_tflops = peak_of(run)
            self.counter = WorkCounter(
                family=run.family,
                loss=run.loss,
                components=run.components,
                checkpoint=run.recipe.model.checkpoint,
                branches=2 if training_sampling(run.recipe).guided else 1,
                trained=not run.recipe.debug.skip_optimizer_step,
            )
        return self.counter


def engine_counts(run: Run) -> Mapping[str, float]:
    """Return what the engine has counted since it started; nothing without one."""
    return {} if run.engines is None else run.engines.engine.counts()


def compilations_of(trainer: object) -> Compilations | None:
    """Return what counts the graphs of a trainer, of rank 0 where there are several; None in eager mode."""
    from drl.cluster.ranks import RankedTrainer
    from drl.model.idle import Idle
    from drl.model.trainer import Trainer

    if isinstance(trainer, RankedTrainer | Idle):
        return None if trainer.own is None else compilations_of(trainer.own)
    return trainer.compilations if isinstance(trainer, Trainer) else None


def tflops_key(phase: str) -> str:
    """Return the metric name of a phase's useful TFLOP/s."""
    return f"perf/{phase}_tflops"


def mfu_key(phase: str) -> str:
    """Return the metric name of the share of its devices' peak that a phase used, 0 to 1."""
    return f"perf/{phase}_mfu"


def peak_of(run: Run) -> float | None:
    """Return the published TFLOP/s of the run's device; an unknown card is said, once.

    None also on the CPU and in float32: the table holds what cards promise for 16 bits.
    """
    device = run.context.device
    if not device.startswith("cuda") or run.recipe.train.forward_dtype == "fp32":
        return None
    import torch

    name = torch.cuda.get_device_name(device)
    peak = published_peak(name)
    if peak is None:
        run.event(f"no MFU is reported: the peak of '{name}' is not in drl's table of cards")
    return peak


def shares(times: Mapping[str, float], timeline: Timeline) -> dict[str, float]:
    """Return the driver's share of an iteration, and how long nothing but rewards was waited for.

    The driver's own time is what no phase claims, phases that are no work of a run's parts, and, inside
    the rollout, the time in which neither engine nor rewards were busy.
    """
    step = times.get(STEP_TIME, 0.0)
    if step <= 0:
        return {}
    own = times.get(UNACCOUNTED, 0.0)
    own += sum(seconds for name, seconds in phases_of(times).items() if name not in WORK)
    rollout = timeline.phases.get(ROLLOUT, ())
    generate = timeline.beside.get("generate", ())
    reward = timeline.beside.get("reward", ())
    figures = {}
    if generate:
        made = shared_seconds(rollout, generate)
        busy = shared_seconds(rollout, joined([*generate, *reward]))
        own += max(0.0, times.get(phase_key(ROLLOUT), 0.0) - busy)
        figures[REWARD_WAIT] = max(0.0, busy - made)
    return figures | {DRIVER_SHARE: own / step}

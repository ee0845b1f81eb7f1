"""The trainer: trainable components, optimizer, and the calls that the loop makes (rank r of N)."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch

from drl.checkpoint.keeper import EVERYTHING, Parts, SaveSettings, StateKeeper
from drl.checkpoint.state import RESUME, RestoreOptions
from drl.errors import ContractError, NonFiniteError
from drl.lora import AdapterSnapshot, adapter_snapshot
from drl.mathematics.schedule import ScheduleSettings, learning_rate
from drl.model.parallel import ALONE, Ranks, reshard, sum_whole_gradients
from drl.model.scaler import OVERFLOW, LossScaler
from drl.model.sleeping import Bed
from drl.model.weights import write_weights
from drl.stages.loss import Forward, check_noise
from drl.stages.parity import batches_of, compared, joined
from drl.stages.recompute import recomputed
from drl.stages.step import accumulate, agree, measure, result_of, start_clipping
from drl.stages.sync import push_component
from drl.types import ParityReport, Shard, StepContext, StepReport

if TYPE_CHECKING:
    from concurrent.futures import Future
    from pathlib import Path

    from torch import nn

    from drl.interfaces.engine import EngineHandle
    from drl.interfaces.updater import PushReport, Updater
    from drl.model.compiled import Compilations
    from drl.model.ema import Ema


@dataclass(frozen=True, slots=True, kw_only=True)
class StepSettings:
    """What a step needs besides its shard: learning rate, clipping, patience with bad steps.

    ``rollout_policy``: "live" pushes the trained weights, "ema" their moving average.
    ``reduce_dtype``: in which ranks add up the gradients of what each of them holds whole.
    ``skip``: why no step is ever taken, where a step is its forward passes alone.
    """

    schedule: ScheduleSettings
    clip_grad: float
    max_bad_steps: int
    buffer_bytes: int
    rollout_policy: str = "live"
    reduce_dtype: str = "fp32"
    skip: str | None = None


class Trainer:
    """TrainerRole in this process. Parameters are float32 masters; the forward dtype is autocast."""

    def __init__(
        self,
        *,
        forward: Forward,
        optimizer: torch.optim.Optimizer,
        settings: StepSettings,
        context: StepContext,
        updater: Updater | None,
        ema: Ema | None = None,
        old: Ema | None = None,
        ranks: Ranks = ALONE,
        saves: SaveSettings = EVERYTHING,
    ) -> None:
        self.forward = forward
        self.optimizer = optimizer
        self.settings = settings
        self.context = context
        self.updater = updater
        self.make_updater: Callable[[str], Updater] | None = None
        self.ema = ema
        self.old = old
        self.ranks = ranks
        self.compilations: Compilations | None = None
        self.scaler = LossScaler(enabled=forward.dtype == "fp16")
        self.global_step = 0
        self.bad_steps = 0
        self.next_rollout = 0
        self.saves = saves
        self.keeper = StateKeeper(
            seed=context.seed, device=forward.device, settings=saves, ranks=ranks
        )
        self.remarks: tuple[str, ...] = ()
        self._trained: list[tuple[str, nn.Parameter]] = []
        self.bed = Bed(forward.device)

    @property
    def models(self) -> Mapping[str, nn.Module]:
        """The trained components by name."""
        return self.forward.models

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Yield the trainable parameters as ``component.name``, in a fixed order."""
        for component, model in self.models.items():
            for name, parameter in model.named_parameters():
                if parameter.requires_grad:
                    yield f"{component}.{name}", parameter

    def train(self, shards: Sequence[Shard]) -> Iterator[StepReport]:
        """Run every window of this rank's shard; one report per optimizer step."""
        self._check_awake()
        shard = shards[self.context.rank]
        if self.old is not None:
            self.old.reset()  # the old policy of a rollout's training is what it started from
        check_noise(self.forward, shard)
        # once: walking through a large model takes the host longer than a step's other work
        self._trained = list(self.named_parameters())
        if self.forward.loss.recomputes_old_log_prob:
            shard = self._recomputed(shard)
        with self.keeper.randomness.in_place():
            for window in range(len(shard.windows)):
                yield self._step(shard, window)
        self.forward.records.clear()
        self.next_rollout = shard.rollout_id + 1
        self.keeper.prepare(self.parts())

    def _recomputed(self, shard: Shard) -> Shard:
        with without_dropout(self.models.values()):
            shard = recomputed(self.forward, shard, self.context)
            reshard(self.models.values())  # there was no backward pass to do it
        return shard

    def _step(self, shard: Shard, window: int) -> StepReport:
        self.optimizer.zero_grad(set_to_none=True)
        rate = learning_rate(self.global_step, self.settings.schedule)
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        metrics: dict[str, float] = {"train/lr": rate}
        take = self._try_step if self.settings.skip is None else self._measure
        skipped = take(shard, window, metrics)
        self._count_bad(skipped)
        if self.compilations is not None:
            metrics |= self.compilations.news()
        last = window + 1 == len(shard.windows)
        if self.ema is not None and last and self.settings.skip is None:
            metrics |= self.ema.advance()
        report = StepReport(
            rollout_id=shard.rollout_id,
            window=window,
            global_step=self.global_step,
            metrics=metrics,
            skipped=skipped,
        )
        self.global_step += 1
        return report

    def _try_step(self, shard: Shard, window: int, metrics: dict[str, float]) -> str | None:
        """Accumulate and step; return why the step was skipped, if it was."""
        divisor = shard.window_weights[window]
        if divisor == 0:
            return "every row of the window has weight 0"
        context = self._context(shard, window)
        # a scale is a power of two, and 1 without one: the quotient loses no bit
        scaled = divisor / self.scaler.scale
        batches, named = shard.windows[window], self._trained
        totals = accumulate(self.forward, batches, scaled, context)
        parameters = [parameter for _, parameter in named]
        sum_whole_gradients(parameters, self.ranks, self.settings.reduce_dtype)
        self.scaler.unscale(parameters)
        # launched before the figures are read: the device has work while the host waits for them
        clipped = start_clipping(named, self.settings.clip_grad, self.ranks)
        result = agree(result_of(batches, totals), self.ranks)
        metrics.update(result.figures.reduced("train/"))
        norm, broken = clipped()
        metrics["train/grad_norm"] = norm
        reason = result.broken or self.scaler.settle(broken)
        metrics |= self.scaler.metrics(overflow=reason is not None and reason.startswith(OVERFLOW))
        if reason is None and norm == 0.0:
            # Adam's momentum would still move the weights
            return "the gradient is exactly 0: no group is informative"
        if reason is None:
            self.optimizer.step()
        return reason

    def _measure(self, shard: Shard, window: int, metrics: dict[str, float]) -> str | None:
        """Run the forward passes of a window for their figures; return why there is no step."""
        if shard.window_weights[window] == 0:
            return "every row of the window has weight 0"
        batches = shard.windows[window]
        totals = measure(self.forward, batches, self._context(shard, window))
        reshard(self.models.values())  # there was no backward pass to do it
        result = agree(result_of(batches, totals), self.ranks)
        metrics.update(result.figures.reduced("train/"))
        return result.broken or self.settings.skip

    def _context(self, shard: Shard, window: int) -> StepContext:
        return replace(self.context, rollout_id=shard.rollout_id, window=window)

    def _count_bad(self, skipped: str | None) -> None:
        if skipped is not None and skipped.startswith(OVERFLOW):
            return
        if skipped is None or not skipped.startswith(("non-finite", "gradient")):
            self.bad_steps = 0
            return
        self.bad_steps += 1
        if self.bad_steps > self.settings.max_bad_steps:
            raise NonFiniteError(
                f"{self.bad_steps} optimizer steps in a row were skipped (trust.max_bad_steps = "
                f"{self.settings.max_bad_steps}); the last because of: {skipped}\n"
                "weights are those of the last good step; lower optimizer.lr or optimizer.clip_grad"
            )

    def rolled_out(self) -> AbstractContextManager[None]:
        """Return a context in which the model holds the weights that engines get."""
        if self.ema is not None and self.settings.rollout_policy == "ema":
            return self.ema.swapped()
        return nullcontext()

    def replay(self, shards: Sequence[Shard]) -> ParityReport:
        """Score the recorded steps without gradient under the weights that engines have, and compare."""
        self._check_awake()
        shard = shards[self.context.rank]
        contexts = [self._context(shard, window) for window in range(len(shard.windows))]
        with self.rolled_out(), without_dropout(self.models.values()):
            report = compared(self.forward, batches_of(shard, contexts))
            reshard(self.models.values())  # there was no backward pass to do it
        self.forward.records.clear()
        return joined(self.ranks.gather(report))

    def use_updater(self, name: str) -> None:
        """Push through the updater of this name from now on."""
        if self.make_updater is None:
            raise ContractError("this trainer was built without a way to make updaters")
        self.updater = self.make_updater(name)

    def push(self, version: int, engines: Sequence[EngineHandle]) -> list[PushReport]:
        """Push the trained weights of every component through the updater."""
        if self.updater is None:
            return []
        self._check_awake()
        self.updater.connect(self.context, engines)
        with self.rolled_out():
            return [
                push_component(
                    self.updater, component, model, version, buffer_bytes=self.settings.buffer_bytes
                )
                for component, model in self.models.items()
            ]

    def save(self, path: Path) -> None:
        """Write the training state into an existing folder; training waits."""
        self.keeper.save(path, self.parts())

    def begin_save(self, path: Path) -> Future[None]:
        """Copy the training state and return; the copy is written into an existing folder meanwhile."""
        return self.keeper.begin_save(path, self.parts())

    def restore(self, path: Path, options: RestoreOptions = RESUME) -> int:
        """Read what ``save`` wrote; return the next rollout id. CheckpointError before anything changed."""
        self._check_awake()
        found = self.keeper.restore(path, self.parts(), options)
        self.settings = replace(self.settings, schedule=found.schedule)
        self.global_step = found.meta["global_step"]
        self.bad_steps = found.meta["bad_steps"]
        self.next_rollout = found.meta["next_rollout_id"]
        self.remarks = found.remarks
        return self.next_rollout

    def adapters(self) -> dict[str, AdapterSnapshot]:
        """Copy the adapters of every component to the CPU; empty when full weights are trained."""
        reshard(self.models.values())
        return {
            component: adapter_snapshot(self.models[component], config)
            for component, config in self.saves.lora.items()
        }

    def write_weights(self, folder: Path) -> list[Path]:
        """Write the weights of fully trained components, whole, into a folder."""
        return write_weights(self.models, folder, self.ranks)

    def parts(self) -> Parts:
        """Return what a training state is made of."""
        return Parts(
            models=self.models,
            parameters=dict(self.named_parameters()),
            optimizer=self.optimizer,
            ema=self.ema,
            scaler=self.scaler,
            schedule=self.settings.schedule,
            position={
                "iteration": self.next_rollout,
                "rollout_id": self.next_rollout - 1,
                "next_rollout_id": self.next_rollout,
                "global_step": self.global_step,
                "bad_steps": self.bad_steps,
            },
        )

    @property
    def payload(self) -> str | None:
        """What the updater pushes ("lora", "dense", "merged"); None without one."""
        return None if self.updater is None else self.updater.payload

    def sleep(self, *, frozen: bool = True) -> None:
        """Move everything to the CPU; ``frozen``: weights that are not trained too. Saves still work."""
        self.bed.lie_down(self.models, self.optimizer, self._averages(), frozen=frozen)

    def wake(self) -> None:
        """Move back what ``sleep`` moved away."""
        self.bed.get_up(self.optimizer, self._averages())

    def _averages(self) -> list[Ema]:
        return [average for average in (self.ema, self.old) if average is not None]

    def _check_awake(self) -> None:
        if self.bed.occupied:
            raise ContractError("the trainer sleeps; call wake before it computes or loads weights")

    def close(self) -> None:
        """Let go of engines; a second call is harmless."""
        if self.updater is not None:
            self.updater.close()


@contextmanager
def without_dropout(models: Iterable[nn.Module]) -> Iterator[None]:
    """Put models into evaluation mode, as engines run them, and back into what they were in."""
    changed = [model for model in models if model.training]
    for model in changed:
        model.eval()
    try:
        yield
    finally:
        for model in changed:
            model.train()

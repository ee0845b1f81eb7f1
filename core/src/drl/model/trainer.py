"""The trainer: trainable components, optimizer, and the calls that the loop makes (rank r of N)."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch

from drl.errors import ContractError, NonFiniteError
from drl.mathematics.schedule import ScheduleSettings, learning_rate
from drl.model.state import read_state, write_state
from drl.stages.loss import Forward, complete_inputs, make_batch, predict, score_transition
from drl.stages.step import accumulate, clip_gradients
from drl.stages.sync import push_component
from drl.types import Pair, ParityReport, Predictions, Shard, StepContext, StepReport

if TYPE_CHECKING:
    from pathlib import Path

    from torch import nn

    from drl.interfaces.engine import EngineHandle
    from drl.interfaces.updater import PushReport, Updater


@dataclass(frozen=True, slots=True, kw_only=True)
class StepSettings:
    """What a step needs besides its shard: learning rate, clipping, patience with bad steps."""

    schedule: ScheduleSettings
    clip_grad: float
    max_bad_steps: int
    buffer_bytes: int


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
    ) -> None:
        self.forward = forward
        self.optimizer = optimizer
        self.settings = settings
        self.context = context
        self.updater = updater
        self.global_step = 0
        self.bad_steps = 0
        self.next_rollout = 0

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
        shard = shards[self.context.rank]
        for window in range(len(shard.windows)):
            yield self._step(shard, window)
        self.next_rollout = shard.rollout_id + 1

    def _step(self, shard: Shard, window: int) -> StepReport:
        self.optimizer.zero_grad(set_to_none=True)
        rate = learning_rate(self.global_step, self.settings.schedule)
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        metrics: dict[str, float] = {"train/lr": rate}
        skipped = self._try_step(shard, window, metrics)
        self._count_bad(skipped)
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
        result = accumulate(self.forward, shard.windows[window], divisor, context)
        metrics.update(result.metrics)
        norm, broken = clip_gradients(self.named_parameters(), self.settings.clip_grad)
        metrics["train/grad_norm"] = norm
        reason = result.broken or broken
        if reason is None and norm == 0.0:
            # Adam's momentum would still move the weights
            return "the gradient is exactly 0: no group is informative"
        if reason is None:
            self.optimizer.step()
        return reason

    def _context(self, shard: Shard, window: int) -> StepContext:
        return replace(self.context, rollout_id=shard.rollout_id, window=window)

    def _count_bad(self, skipped: str | None) -> None:
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

    def replay(self, shards: Sequence[Shard]) -> ParityReport:
        """Score the recorded steps without gradient, exactly as training will, and compare."""
        worst: dict[int, float] = defaultdict(float)
        rows = 0
        shard = shards[self.context.rank]
        for window, batches in enumerate(shard.windows):
            context = self._context(shard, window)
            for pairs in batches:
                for pair, value in zip(pairs, self._differences(pairs, context), strict=True):
                    if pair.weight:
                        step = int(pair.values["step"])
                        # NaN must not hide behind max
                        worst[step] = value if math.isnan(value) else max(worst[step], value)
                        rows += 1
        return ParityReport(by_step=dict(sorted(worst.items())), rows=rows)

    @torch.no_grad()
    def _differences(self, pairs: Sequence[Pair], context: StepContext) -> list[float]:
        """Return |trainer - engine| log-prob of each row."""
        batch = make_batch(pairs, self.forward.device)
        prepared = self.forward.loss.prepare(batch, context)
        inputs = complete_inputs(self.forward, batch, prepared)
        predictions = Predictions(trained=predict(self.forward, batch, inputs))
        scored = score_transition(self.forward, batch, predictions)
        if scored is None:
            raise ContractError("only losses that need a transition can be compared with a rollout")
        new_B = torch.stack(list(scored.log_prob_B.values())).sum(dim=0)
        values: list[float] = (new_B - batch.values["log_prob_old"]).abs().tolist()
        return values

    def push(self, version: int, engines: Sequence[EngineHandle]) -> list[PushReport]:
        """Push the trained weights of every component through the updater."""
        if self.updater is None:
            return []
        self.updater.connect(self.context, engines)
        return [
            push_component(
                self.updater, component, model, version, buffer_bytes=self.settings.buffer_bytes
            )
            for component, model in self.models.items()
        ]

    def save(self, path: Path) -> None:
        """Write trainable parameters, optimizer state and counters into a folder."""
        write_state(
            path,
            parameters=dict(self.named_parameters()),
            optimizer=self.optimizer,
            counters={
                "global_step": self.global_step,
                "bad_steps": self.bad_steps,
                "next_rollout": self.next_rollout,
            },
        )

    def restore(self, path: Path) -> int:
        """Read what ``save`` wrote; return the next rollout id."""
        counters = read_state(
            path, parameters=dict(self.named_parameters()), optimizer=self.optimizer
        )
        self.global_step = counters["global_step"]
        self.bad_steps = counters["bad_steps"]
        self.next_rollout = counters["next_rollout"]
        return self.next_rollout

    def sleep(self) -> None:
        """Nothing to free in this process: it shares the device with its own engine."""

    def wake(self) -> None:
        """The counterpart of ``sleep``."""

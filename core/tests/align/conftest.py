"""A model of one number whose forward can be followed by hand, and scenes of recorded steps for it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from drl.align.changes import Scene
from drl.align.measure import Replay, rechunked, score
from drl.interfaces.family import (
    Family,
    Pipeline,
    TrainPipelineConfig,
    WeightSource,
)
from drl.interfaces.loss import Loss
from drl.interfaces.steps import SdeBackend
from drl.mathematics.gaussian import log_prob, over_rows
from drl.stages.alignment import OUTPUT
from drl.stages.loss import Forward
from drl.testing import make_pair
from drl.types import (
    VISUAL,
    Condition,
    ConditionRecord,
    Context,
    ForwardInputs,
    Guidance,
    LossOutput,
    Need,
    Pair,
    PairBatch,
    StepContext,
    Streams,
    Transition,
)


class Gain(nn.Module):
    """Velocity ``gain x + mean of the text + by_rows times the rows of the forward``, with dropout."""

    def __init__(self, by_rows: float, dropout: float) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.tensor(0.5))
        self.by_rows = by_rows
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor, text: Tensor) -> Tensor:
        shift_B = text.flatten(1).mean(1) + self.by_rows * x.shape[0]
        return self.dropout(self.gain * x + over_rows(shift_B, x))


class Toy(Family):
    """One stream, plain guidance."""

    def condition(self, record: ConditionRecord) -> Condition:
        return Condition(arguments={"text": record.tensors["text"][None]})

    def collate(self, conditions: Sequence[Condition], pad_to: int | None = None) -> Condition:
        text = torch.cat([one.arguments["text"] for one in conditions])
        return Condition(arguments={"text": text}, rows=text.shape[0])

    def model_time(self, sigma_B: Tensor, timestep_B: Tensor | None) -> Tensor:
        return timestep_B if timestep_B is not None else 1000 * sigma_B

    def forward(
        self,
        model: nn.Module,
        streams: Streams,
        model_time_B: Tensor | None,
        condition: Condition,
    ) -> Streams:
        return {VISUAL: model(streams[VISUAL], condition.arguments["text"])}

    def guide(self, positive: Streams, negative: Streams, guidance: Guidance) -> Streams:
        other = negative[VISUAL]
        return {VISUAL: other + guidance.scale * (positive[VISUAL] - other)}

    def pipeline_config(self, component: str, config: Mapping[str, Any]) -> TrainPipelineConfig:
        raise NotImplementedError

    def build(self, component: str, source: WeightSource) -> nn.Module:
        raise NotImplementedError

    def component_config(self, component: str, checkpoint: str) -> Mapping[str, Any]:
        raise NotImplementedError

    def pipeline(self, checkpoint: str, context: Context) -> Pipeline | None:
        return None


class Euler(SdeBackend):
    """A Gaussian step around ``x + v dt``."""

    def transition(
        self,
        latents: Tensor,
        velocity: Tensor,
        sigma_B: Tensor,
        sigma_next_B: Tensor,
        *,
        sigma_max_B: Tensor,
    ) -> Transition:
        mean = latents + velocity * over_rows(sigma_next_B - sigma_B, latents)
        return Transition(mean=mean, noise_std=sigma_max_B, std_dev_t=sigma_max_B)

    def log_prob(self, next_latents: Tensor, transition: Transition) -> Tensor:
        return log_prob(next_latents, transition.mean, transition.noise_std)


class Recorded(Loss):
    """Feeds the recorded latents; no formula is asked for."""

    needs = frozenset({Need.TRANSITION, Need.GUIDANCE, Need.OLD_LOG_PROB})

    def expand(self, unit: Any, advantages: Any, context: StepContext) -> list[Pair]:
        return []

    def prepare(self, pairs: PairBatch, context: StepContext) -> ForwardInputs:
        return ForwardInputs(streams={VISUAL: pairs.tensors[VISUAL]})

    def compute(self, *ignored: Any) -> LossOutput:
        raise NotImplementedError


def forward_of(by_rows: float, dropout: float, scale: float) -> Forward:
    context = StepContext()
    return Forward(
        family=Toy(None, Context()),
        models={"transformer": Gain(by_rows, dropout).train()},
        loss=Recorded(None, context),
        backend=Euler(None, Context()),
        device=torch.device("cpu"),
        dtype="fp32",
        guidance={"guidance_scale": Guidance(scale=scale)},
    )


def pairs_of(count: int) -> list[Pair]:
    return [
        make_pair(
            id=(number, number % 2),
            unit=number,
            seed=number,
            sigma=0.75 - 0.25 * (number % 2),
            values={
                "step": float(number % 2),
                "sigma_next": 0.5 - 0.25 * (number % 2),
                "sigma_max": 0.75,
                "log_prob_old": 0.0,
            },
        )
        for number in range(count)
    ]


def recorded_as(replay: Replay, pairs: Sequence[Pair], rows: int) -> list[Pair]:
    """Return pairs with the log-probs that an engine with this forward would have recorded."""
    figures = score(replay, rechunked(pairs, rows))
    return [
        replace(pair, values={**pair.values, "log_prob_old": figures[pair.id].log_prob})
        for pair in pairs
    ]


def with_outputs(pairs: Sequence[Pair], outputs: Callable[[Pair], Tensor]) -> list[Pair]:
    return [replace(pair, debug={OUTPUT: outputs(pair)}) for pair in pairs]


@pytest.fixture
def scene() -> Callable[..., Scene]:
    """Make a scene: what the engine did (``engine``: changes of the forward, ``engine_rows``) and the trainer."""

    def make(
        *,
        by_rows: float = 0.0,
        dropout: float = 0.0,
        scale: float = 3.0,
        engine_rows: int = 4,
        rows: int = 4,
        count: int = 8,
        **engine: Any,
    ) -> Scene:
        forward = forward_of(by_rows, dropout, scale)
        trainer = Replay(forward=forward, context=StepContext())
        other = replace(trainer, forward=replace(forward, **engine), training=False)
        pairs = recorded_as(other, pairs_of(count), engine_rows)
        return Scene(
            replay=trainer,
            batches=rechunked(pairs, rows),
            engine_options={"rows": engine_rows},
        )

    return make

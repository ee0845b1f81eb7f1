"""From a run's own figures to rates: what each phase took, beside what the plan says it did.

A rollout is forwards, decoding and the rest of its samples. Where the card's forward rate is known, what the
rollout took beyond it is put down to its samples; where it is not, all of it counts as forwards. In the same
way training is what it took beyond the passes without gradient.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from drl.plan.memory import EXACT, ROLLOUT, SYNC, TRAIN, training
from drl.plan.rates import (
    ACTIVATIONS,
    DECODE,
    DRIVER,
    FORWARD,
    RECOMPUTED,
    SAMPLE,
    TRAINING,
    Observation,
    RateKey,
    Rates,
    record_rates,
)
from drl.plan.rates import SYNC as PUSH
from drl.plan.seconds import forward_only_seconds, sampling_seconds

if TYPE_CHECKING:
    from drl.plan.predict import Prediction


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """Figures of one typical iteration: medians over iterations, the first left out.

    ``seconds`` by the names of drl's phases (rollout, train, update_weights …), ``iteration_s`` of all of it.
    ``peak_bytes`` by phase, of the device's allocator; empty where it has none.
    """

    seconds: Mapping[str, float]
    iteration_s: float | None = None
    peak_bytes: Mapping[str, int] = field(default_factory=dict)
    source: str = ""


def record_run(prediction: Prediction, measured: Measured, path: Path | None = None) -> Path | None:
    """Add what a run has shown to the user's rates; return the file, None when it showed nothing."""
    written = add(
        prediction,
        list(of_the_rollout(prediction, measured)),
        path,
        compiled=prediction.scenario.engine_compiled,
    )
    # a forward's rate, if that was one, tells what training does without gradient
    knowing = prediction.instead()
    more = list(of_the_training(knowing, measured))
    return add(knowing, more, path, compiled=knowing.scenario.compiled) or written


def add(
    prediction: Prediction,
    observations: Sequence[Observation],
    path: Path | None,
    *,
    compiled: bool,
) -> Path | None:
    """Write observations of the prediction's card; None when there are none."""
    if not observations:
        return None
    key = RateKey(
        device=prediction.card.name,
        torch=prediction.card.torch,
        dtype=prediction.dtype,
        compiled=compiled,
    )
    return record_rates(key, observations, path)


def of_the_rollout(prediction: Prediction, measured: Measured) -> Iterator[Observation]:
    """Yield what a rollout shows of forwards, or of what comes beside them."""
    seconds = measured.seconds.get(ROLLOUT)
    if seconds is None or not prediction.scenario.rollout:
        return
    work, rates = prediction.work, prediction.rates.engine
    known = None
    if rates is not None:
        known = sampling_seconds(work, rates)
    if rates is None or known is None:
        yield Observation(
            kind=FORWARD,
            work=work.sampling / work.sampling_calls,
            value=seconds / work.sampling_calls,
            source=measured.source,
        )
        return
    decode = DECODE + prediction.scenario.decoded_as
    decoding = rates.value(decode, work=work.megapixels, calls=work.decodes) or 0.0
    rest = seconds - known - decoding
    if rest > 0:
        samples = prediction.scenario.samples
        yield Observation(kind=SAMPLE, work=samples, value=rest, source=measured.source)


def of_the_training(prediction: Prediction, measured: Measured) -> Iterator[Observation]:
    """Yield what an iteration shows of training, pushes, the driver, and of activations."""
    seconds, work, source = measured.seconds, prediction.work, measured.source
    if TRAIN in seconds:
        yield from training_observations(prediction, seconds[TRAIN], source)
    if SYNC in seconds and work.pushed:
        yield Observation(kind=PUSH, work=work.pushed, value=seconds[SYNC], source=source)
    if measured.iteration_s is not None:
        rest = max(0.0, measured.iteration_s - sum(seconds.values()))
        yield Observation(kind=DRIVER, work=0.0, value=rest, source=source)
    peak = measured.peak_bytes.get(TRAIN)
    if peak is not None and prediction.scenario.compiled and not prediction.scenario.checkpointed:
        expected = training(prediction.anatomy, prediction.scenario, EXACT)
        kept = peak - (expected.peak - expected.activations)
        if kept > 0:
            yield Observation(
                kind=ACTIVATIONS, work=expected.activations, calls=0.0, value=kept, source=source
            )


def training_observations(
    prediction: Prediction, seconds: float, source: str
) -> Iterator[Observation]:
    """Yield the rate of training, or of second forwards where that of training is known already."""
    work, rates = prediction.work, prediction.rates.trainer
    calls = work.micro_batches
    trained = None if rates is None else rates.value(TRAINING, work=work.training, calls=calls)
    scored = scored_seconds(prediction, rates)
    if work.recomputed and trained is not None:
        rest = seconds - trained - scored
        if rest > 0:
            yield Observation(
                kind=RECOMPUTED, work=work.recomputed / calls, value=rest / calls, source=source
            )
        return
    others = None if rates is None else forward_only_seconds(work, rates)
    flops, rest = work.trainers, seconds
    if others is not None and others < seconds:
        flops, rest = work.training, seconds - others
    yield Observation(kind=TRAINING, work=flops / calls, value=rest / calls, source=source)


def scored_seconds(prediction: Prediction, rates: Rates | None) -> float:
    """Return the seconds of passes without gradient, 0 where nothing is known of them."""
    work = prediction.work
    if rates is None or not work.scored:
        return 0.0
    return rates.value(FORWARD, work=work.scored, calls=work.scored_calls) or 0.0

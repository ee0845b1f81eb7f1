"""From a run's own figures to rates: what each phase took, beside what the plan says it did.

A rollout is forwards, decoding and the rest of its samples. Where the card's forward rate is known, what the
rollout took beyond it is put down to its samples; where it is not, all of it counts as forwards. In the same
way training is what it took beyond the passes without gradient. What took less than its known parts says that
these are faster than was thought: what had been put down to the rest goes, and each part is as much faster.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

from drl.plan.memory import EXACT, ROLLOUT, SYNC, TRAIN, training
from drl.plan.rates import (
    ACTIVATIONS,
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
from drl.plan.seconds import forward_only_seconds, recomputed_seconds, rollout_parts

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
    compiled = prediction.scenario.engine_compiled
    if rollout_is_faster(prediction, measured):
        prediction = without(prediction, SAMPLE, path, compiled=compiled)
    found = list(of_the_rollout(prediction, measured))
    written = add(prediction, found, path, compiled=compiled)
    # what was just written is read: a forward's rate tells what training does without gradient
    knowing = replace(prediction)
    compiled = knowing.scenario.compiled
    if training_is_faster(knowing, measured):
        knowing = without(knowing, RECOMPUTED, path, compiled=compiled)
    more = list(of_the_training(knowing, measured))
    return add(knowing, more, path, compiled=compiled) or written


def add(
    prediction: Prediction,
    observations: Sequence[Observation],
    path: Path | None,
    *,
    compiled: bool,
    forget: Collection[str] = (),
) -> Path | None:
    """Write observations of the prediction's card, instead of those of kinds to forget; None without any."""
    # a phase that took no time at all tells no rate
    seen = [one for one in observations if one.value > 0 or one.kind == DRIVER]
    if not seen and not forget:
        return None
    key = RateKey(
        device=prediction.card.name,
        torch=prediction.card.torch,
        dtype=prediction.dtype,
        compiled=compiled,
    )
    return record_rates(key, seen, path, forget=forget)


def without(prediction: Prediction, kind: str, path: Path | None, *, compiled: bool) -> Prediction:
    """Forget the user's observations of a kind; return the prediction, which will read what is left."""
    add(prediction, (), path, compiled=compiled, forget=(kind,))
    return replace(prediction)


def faster(parts: Sequence[Observation], seconds: float, source: str) -> Iterator[Observation]:
    """Yield the parts of what took so many seconds: each in its share of what they were thought to take."""
    factor = seconds / sum(part.value for part in parts)
    for part in parts:
        if part.value > 0:
            yield Observation(
                kind=part.kind,
                work=part.work / part.calls,
                value=factor * part.value / part.calls,
                source=source,
            )


def parts_of(prediction: Prediction) -> list[Observation]:
    """Return what is known of a rollout but the rest of its samples."""
    return rollout_parts(prediction.work, prediction.scenario, prediction.rates.engine)


def rollout_is_faster(prediction: Prediction, measured: Measured) -> bool:
    """Return whether a rollout took no longer than its known parts alone."""
    seconds = measured.seconds.get(ROLLOUT)
    if not seconds or not prediction.scenario.rollout:
        return False
    parts = parts_of(prediction)
    return bool(parts) and seconds <= sum(part.value for part in parts)


def of_the_rollout(prediction: Prediction, measured: Measured) -> Iterator[Observation]:
    """Yield what a rollout shows of forwards, or of what comes beside them."""
    seconds, source = measured.seconds.get(ROLLOUT), measured.source
    if not seconds or not prediction.scenario.rollout:
        return
    work, samples = prediction.work, prediction.scenario.samples
    parts, rates = parts_of(prediction), prediction.rates.engine
    if rates is None or not parts:
        calls = work.sampling_calls
        yield Observation(
            kind=FORWARD, work=work.sampling / calls, value=seconds / calls, source=source
        )
    elif rollout_is_faster(prediction, measured):
        beside = rates.value(SAMPLE, work=samples) or 0.0
        rest = Observation(kind=SAMPLE, work=samples, value=beside)
        yield from faster([*parts, rest], seconds, source)
    else:
        rest_seconds = seconds - sum(part.value for part in parts)
        yield Observation(kind=SAMPLE, work=samples, value=rest_seconds, source=source)


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
    calls, scored = work.micro_batches, scored_seconds(prediction, rates)
    trained = trained_seconds(prediction, rates)
    again = None if rates is None else recomputed_seconds(work, rates)
    if trained is not None and seconds > trained + scored:
        yield Observation(
            kind=RECOMPUTED,
            work=work.recomputed / calls,
            value=(seconds - trained - scored) / calls,
            source=source,
        )
        return
    if trained is not None and again is not None and seconds > scored:
        parts = [
            Observation(kind=TRAINING, work=work.training, calls=calls, value=trained),
            Observation(kind=RECOMPUTED, work=work.recomputed, calls=calls, value=again),
        ]
        yield from faster(parts, seconds - scored, source)
        return
    others = None if rates is None else forward_only_seconds(work, rates)
    flops, rest = work.trainers, seconds
    if others is not None and others < seconds:
        flops, rest = work.training, seconds - others
    yield Observation(kind=TRAINING, work=flops / calls, value=rest / calls, source=source)


def training_is_faster(prediction: Prediction, measured: Measured) -> bool:
    """Return whether training with second forwards took no longer than it is known to take without."""
    rates = prediction.rates.trainer
    trained = trained_seconds(prediction, rates)
    if trained is None or TRAIN not in measured.seconds:
        return False
    return measured.seconds[TRAIN] <= trained + scored_seconds(prediction, rates)


def trained_seconds(prediction: Prediction, rates: Rates | None) -> float | None:
    """Return training without its second forwards; None without such forwards, or where it is not known."""
    work = prediction.work
    if rates is None or not work.recomputed:
        return None
    return rates.value(TRAINING, work=work.training, calls=work.micro_batches)


def scored_seconds(prediction: Prediction, rates: Rates | None) -> float:
    """Return the seconds of passes without gradient, 0 where nothing is known of them."""
    work = prediction.work
    if rates is None or not work.scored:
        return 0.0
    return rates.value(FORWARD, work=work.scored, calls=work.scored_calls) or 0.0

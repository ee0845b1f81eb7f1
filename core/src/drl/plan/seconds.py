"""Seconds of one iteration, from its work and the measured rates of a card."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from drl.plan.memory import ROLLOUT, SYNC, TRAIN
from drl.plan.rates import (
    APPLIED,
    DECODE,
    DRIVER,
    FORWARD,
    RECOMPUTED,
    SAMPLE,
    TRAINING,
    Observation,
    Rates,
)
from drl.plan.rates import SYNC as SYNC_KIND

if TYPE_CHECKING:
    from drl.plan.scenario import Scenario
    from drl.plan.work import Work


@dataclass(frozen=True, slots=True, kw_only=True)
class CardRates:
    """Rates of the engine's and of the trainer's forwards: one of them may be compiled and the other not."""

    engine: Rates | None
    trainer: Rates | None


def seconds_of(work: Work, scenario: Scenario, rates: CardRates) -> dict[str, float]:
    """Return the seconds of each phase that the rates tell; phases that they do not tell are left out."""
    found = {
        ROLLOUT: rollout_seconds(work, scenario, rates.engine) if scenario.rollout else None,
        TRAIN: training_seconds(work, rates.trainer),
        SYNC: push_seconds(work, rates.trainer) if scenario.rollout else None,
        "other": None if rates.trainer is None else rates.trainer.value(DRIVER, work=0.0),
    }
    return {name: seconds for name, seconds in found.items() if seconds is not None}


def rollout_seconds(work: Work, scenario: Scenario, rates: Rates | None) -> float | None:
    """Return the known parts, and the rest of a sample where it was measured."""
    parts = rollout_parts(work, scenario, rates)
    if rates is None or not parts:
        return None
    return sum(part.value for part in parts) + (rates.value(SAMPLE, work=scenario.samples) or 0.0)


def rollout_parts(work: Work, scenario: Scenario, rates: Rates | None) -> list[Observation]:
    """Return forwards, applied adapters and decoding, as far as they were measured; [] without forwards.

    Adapters that were never measured go at the rate of the rest.
    """
    if rates is None:
        return []
    calls, flops = work.sampling_calls, work.sampling
    kinds = [(DECODE + scenario.decoded_as, work.megapixels, work.decodes)]
    if work.applied and rates.value(APPLIED, work=work.applied, calls=calls) is not None:
        flops -= work.applied
        kinds.append((APPLIED, work.applied, calls))
    if rates.value(FORWARD, work=flops, calls=calls) is None:
        return []
    parts = []
    for kind, amount, times in ((FORWARD, flops, calls), *kinds):
        seconds = rates.value(kind, work=amount, calls=times)
        if seconds is not None:
            parts.append(Observation(kind=kind, work=amount, calls=times, value=seconds))
    return parts


def training_seconds(work: Work, rates: Rates | None) -> float | None:
    """Return forwards and backwards; second forwards and passes without gradient go at a forward's rate.

    Where a forward was never measured by itself, all goes at the rate of training.
    """
    if rates is None:
        return None
    others = forward_only_seconds(work, rates)
    if others is None:
        return rates.value(TRAINING, work=work.trainers, calls=work.micro_batches)
    trained = rates.value(TRAINING, work=work.training, calls=work.micro_batches)
    return None if trained is None else trained + others


def forward_only_seconds(work: Work, rates: Rates) -> float | None:
    """Return the seconds of passes without gradient and of second forwards; 0 where training has neither."""
    scored = rates.value(FORWARD, work=work.scored, calls=work.scored_calls)
    again = recomputed_seconds(work, rates)
    parts = [part for part, flops in ((scored, work.scored), (again, work.recomputed)) if flops]
    return None if None in parts else sum(part for part in parts if part is not None)


def recomputed_seconds(work: Work, rates: Rates) -> float | None:
    """Return the seconds of second forwards: by their own rate, or else by that of forwards."""
    own = rates.value(RECOMPUTED, work=work.recomputed, calls=work.micro_batches)
    if own is not None:
        return own
    return rates.value(FORWARD, work=work.recomputed, calls=work.micro_batches)


def push_seconds(work: Work, rates: Rates | None) -> float | None:
    """Return one push."""
    return None if rates is None else rates.value(SYNC_KIND, work=work.pushed)

"""Seconds of one iteration, from its work and the measured rates of a card."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from drl.plan.memory import ROLLOUT, SYNC, TRAIN
from drl.plan.rates import APPLIED, DECODE, DRIVER, FORWARD, RECOMPUTED, SAMPLE, TRAINING, Rates
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
    """Return the forwards; decoding and the rest of a sample where they were measured."""
    if rates is None:
        return None
    forwards = sampling_seconds(work, rates)
    if forwards is None:
        return None
    decoding = rates.value(DECODE + scenario.decoded_as, work=work.megapixels, calls=work.decodes)
    beside = rates.value(SAMPLE, work=scenario.samples)
    return forwards + (decoding or 0.0) + (beside or 0.0)


def sampling_seconds(work: Work, rates: Rates) -> float | None:
    """Return the engine's forwards; adapters that were never measured go at the rate of the rest."""
    beside = None
    if work.applied:
        beside = rates.value(APPLIED, work=work.applied, calls=work.sampling_calls)
    flops = work.sampling if beside is None else work.sampling - work.applied
    forwards = rates.value(FORWARD, work=flops, calls=work.sampling_calls)
    return None if forwards is None else forwards + (beside or 0.0)


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
    again = rates.value(RECOMPUTED, work=work.recomputed, calls=work.micro_batches)
    if again is None:
        again = rates.value(FORWARD, work=work.recomputed, calls=work.micro_batches)
    parts = [part for part, flops in ((scored, work.scored), (again, work.recomputed)) if flops]
    return None if None in parts else sum(part for part in parts if part is not None)


def push_seconds(work: Work, rates: Rates | None) -> float | None:
    """Return one push."""
    return None if rates is None else rates.value(SYNC_KIND, work=work.pushed)

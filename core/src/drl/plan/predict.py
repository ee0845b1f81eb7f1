"""From a recipe to what it will need: memory by phase, work, seconds; nothing is loaded.

``predict`` builds what tells: family, loss and engine of the recipe (none of them starts), and the trained
components on the meta device.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch

from drl.errors import BadInput
from drl.interfaces.engine import Engine
from drl.interfaces.outline import EngineOutline
from drl.plan.anatomy import Anatomy
from drl.plan.memory import EXACT, Measured, PhaseMemory, phases_of
from drl.plan.rates import (
    ACTIVATIONS,
    WORKSPACE,
    RateKey,
    Rates,
    find_rates,
    known_devices,
    release,
)
from drl.plan.scenario import Scenario, scenario_of
from drl.plan.seconds import CardRates, seconds_of
from drl.plan.work import Work, work_of
from drl.trainers import Maker, rank_context, rank_settings, trains_nothing
from drl.types import Need, Role

if TYPE_CHECKING:
    from drl.catalog import Catalog
    from drl.interfaces.family import Family
    from drl.interfaces.loss import Loss

CPU = "CPU"


@dataclass(frozen=True, slots=True, kw_only=True)
class Card:
    """A device to plan for. ``memory``: its bytes, None where they are not known."""

    name: str
    memory: int | None = None
    torch: str = release(torch.__version__)


def this_card(device: str) -> Card:
    """Return the device of this machine; a CPU has no memory of its own to plan for."""
    if not device.startswith("cuda") or not torch.cuda.is_available():
        return Card(name=CPU)
    properties = torch.cuda.get_device_properties(torch.device(device))
    return Card(name=properties.name, memory=properties.total_memory)


@dataclass(frozen=True, kw_only=True)
class Prediction:
    """What an iteration needs on a card. ``scenario`` can be changed: ``instead`` predicts that one.

    ``rank``: of the recipe's own adapters.
    """

    card: Card
    anatomy: Anatomy
    scenario: Scenario
    engine: EngineOutline | None
    dtype: str
    rank: int | None = None

    @property
    def lora_rank(self) -> int | None:
        """Rank of the scenario's adapters; None without adapters."""
        return None if self.rank is None else int(self.rank * self.scenario.rank_factor)

    @cached_property
    def rates(self) -> CardRates:
        """What was measured on this card."""
        return CardRates(
            engine=self._rates(compiled=self.scenario.engine_compiled),
            trainer=self._rates(compiled=self.scenario.compiled),
        )

    def _rates(self, *, compiled: bool) -> Rates | None:
        key = RateKey(
            device=self.card.name, torch=self.card.torch, dtype=self.dtype, compiled=compiled
        )
        return find_rates(key)

    @cached_property
    def phases(self) -> tuple[PhaseMemory, ...]:
        """Memory by phase, in the order of an iteration."""
        return phases_of(self.anatomy, self.scenario, measured_of(self.rates.trainer))

    @property
    def peak_bytes(self) -> Mapping[str, int]:
        """The peak of each phase, by the names of drl's phases."""
        return {phase.name: phase.peak for phase in self.phases}

    @property
    def rooms(self) -> Mapping[str, int]:
        """What each phase needs of a card: its peak, and what graphs keep beside it."""
        return {phase.name: phase.room for phase in self.phases}

    @property
    def largest(self) -> PhaseMemory:
        """The phase that needs the most room on a card."""
        return max(self.phases, key=lambda phase: phase.room)

    @cached_property
    def work(self) -> Work:
        """Matrix products of one iteration."""
        return work_of(self.anatomy, self.scenario)

    @cached_property
    def seconds(self) -> Mapping[str, float] | None:
        """Seconds of one iteration by phase, None without measured rates of this card.

        Without parity replay, evaluation and save, which not every iteration has; rewards are scored
        beside the rollout and count where they are slower than it.
        """
        found = seconds_of(self.work, self.scenario, self.rates)
        return found if self.lacking == () else None

    @property
    def lacking(self) -> tuple[str, ...]:
        """Phases that nothing was measured of."""
        found = seconds_of(self.work, self.scenario, self.rates)
        wanted = ("rollout", "train") if self.scenario.rollout else ("train",)
        return tuple(name for name in wanted if name not in found)

    def instead(self, **changes: Any) -> Prediction:
        """Return the prediction of a changed scenario; what was measured of the model is kept."""
        return Prediction(
            card=self.card,
            anatomy=self.anatomy,
            scenario=replace(self.scenario, **changes),
            engine=self.engine,
            dtype=self.dtype,
            rank=self.rank,
        )


def measured_of(rates: Rates | None) -> Measured:
    """Return what a card adds to the arithmetic of memory."""
    if rates is None:
        return EXACT
    share = rates.value(ACTIVATIONS, work=1.0, calls=0.0)
    workspace = rates.value(WORKSPACE, work=0.0)
    return Measured(
        trained_share=1.0 if share is None else share,
        workspace=0 if workspace is None else int(workspace),
    )


def predict(recipe: Any, catalog: Catalog, card: Card | None = None) -> Prediction:
    """Predict one iteration of a recipe on a card, this machine's by default.

    Raises BadInput when the checkpoint's configs cannot be read, when the family gives no outline, and for a
    recipe that trains nothing.
    """
    if trains_nothing(recipe):
        raise BadInput(
            "this recipe trains nothing (debug.rollout_only, or train.num_rollout = 0); plan it without that "
            "option"
        )
    context = replace(
        rank_context(recipe, None, rank_settings(recipe), 0), device="cpu", section=None
    )
    make = Maker(recipe, catalog, context)
    family: Family = make("family", recipe.model.family, "model")
    anatomy = Anatomy(recipe, family, make.context)
    # without the functions of the recipe: they are nobody's business before a run
    loss: Loss = make("loss", recipe.algorithm.loss, "algorithm", Role.TRAIN)
    engine = engine_outline(make, recipe) if Need.ROLLOUT in loss.needs else None
    return Prediction(
        card=this_card(recipe.cluster.device) if card is None else card,
        anatomy=anatomy,
        scenario=scenario_of(recipe, loss, engine, anatomy.outline),
        engine=engine,
        dtype=recipe.train.forward_dtype,
        rank=recipe.lora.rank if recipe.lora.enabled else None,
    )


def engine_outline(make: Maker, recipe: Any) -> EngineOutline | None:
    """Return the outline of the recipe's engine; None for a run without one."""
    if recipe.train.train_only or recipe.debug.load_rollout_data is not None:
        return None
    engine: Engine = make("engine", recipe.rollout.engine, "rollout", Role.ROLLOUT)
    return engine.outline()


def no_rates(card: Card) -> str:
    """Say what to do where nothing was measured of a card."""
    known = known_devices()
    others = f"; rates exist for {', '.join(known)} (--device-name)" if known else ""
    return f"no measured rates for {card.name}: run  drl bench RECIPE  on it{others}"

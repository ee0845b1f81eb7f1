"""From a recipe to what it will need: memory by phase, work, seconds; nothing is loaded.

``predict`` builds what tells: family, loss and engine of the recipe (none of them starts), and the trained
components on the meta device.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch

from drl.config.messages import did_you_mean
from drl.errors import BadInput
from drl.interfaces.engine import Engine
from drl.interfaces.outline import EngineOutline
from drl.plan.anatomy import Anatomy, NoPlan
from drl.plan.memory import EXACT, Measured, PhaseMemory, phases_of
from drl.plan.rates import (
    ACTIVATIONS,
    WORKSPACE,
    RateKey,
    Rates,
    find_rates,
    rates_path,
    read_table,
    release,
    shipped_table,
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
UNNAMED = "an unnamed card"
"""A GPU to plan for where there is none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Card:
    """A device to plan for. ``memory``: its bytes, None where they are not known."""

    name: str
    memory: int | None = None
    torch: str = release(torch.__version__)


def this_card(device: str) -> Card:
    """Return the device of this machine; a CPU has no memory of its own to plan for."""
    if not device.startswith("cuda"):
        return Card(name=CPU)
    if not torch.cuda.is_available():
        return Card(name=UNNAMED)
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
        return replace(self, scenario=replace(self.scenario, **changes))


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

    Raises NoPlan when the family gives no outline, and for a recipe that trains nothing; BadInput when the
    checkpoint's configs cannot be read, and for what the run would refuse as well.
    """
    if trains_nothing(recipe):
        raise NoPlan(
            "this recipe trains nothing (debug.rollout_only, or train.num_rollout = 0); plan it without that "
            "option"
        )
    if recipe.debug.skip_optimizer_step:
        raise NoPlan(
            "debug.skip_optimizer_step: a run that takes no step has no backward pass; plan it without that option"
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
    outline = engine.outline()
    if outline is not None and outline.graphs_option is not None and recipe.cluster.device == "cpu":
        raise BadInput(
            f"{outline.graphs_option} is true, but the engine runs on cpu: CUDA graphs need an NVIDIA GPU; set it "
            "to false"
        )
    return outline


def no_rates(found: Prediction) -> str:
    """Say what to do where nothing was measured of a card as the recipe uses it."""
    name, scenario = found.card.name, found.scenario
    modes = {"rollout": scenario.engine_compiled, "train": scenario.compiled}
    wanted = sorted({as_said(found.dtype, compiled=modes[phase]) for phase in found.lacking})
    said = f"no measured rates for {name} in {' and '.join(wanted)}"
    known = known_rates()
    if near := near_name(name, list(known)):
        return said + near
    cards = ", ".join(f"'{other}'" for other in known if other not in {name, CPU})
    if name == UNNAMED:
        return f"{said}: name one that rates exist for by --device-name: {cards}"
    said += ": run  drl bench RECIPE  on it"
    if name in known:
        return f"{said}; rates of {name} exist for {', '.join(known[name])}"
    return f"{said}; rates exist for {cards} (--device-name)"


def as_said(dtype: str, *, compiled: bool) -> str:
    """Return a dtype, and whether blocks are compiled, in words."""
    return f"{dtype} compiled" if compiled else dtype


def known_rates() -> dict[str, list[str]]:
    """Return the cards that rates exist for, each with dtypes and whether compiled, sorted."""
    tables = [shipped_table(), *([read_table(rates_path())] if rates_path().exists() else [])]
    known: dict[str, set[str]] = {}
    for key in (key for table in tables for key in table.rows):
        known.setdefault(key.device, set()).add(as_said(key.dtype, compiled=key.compiled))
    return {name: sorted(known[name]) for name in sorted(known)}


def near_name(name: str, known: Sequence[str]) -> str:
    """Return "; did you mean 'x'?" for another spelling of a card; one of another number is another card."""
    numbers = re.findall(r"\d+", name)
    alike = {one.lower(): one for one in known if re.findall(r"\d+", one) == numbers}
    if name in known:
        return ""
    found = did_you_mean(name, list(alike))
    for lowered, one in alike.items():
        found = found.replace(f"'{lowered}'", f"'{one}'")
    return found

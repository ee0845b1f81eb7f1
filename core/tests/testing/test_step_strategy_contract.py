"""The step strategy contract fails on strategies that go astray, forget latents or throw their own dice."""

from __future__ import annotations

import random
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from contract_runs import Verdict, judged, offered, plugin_in

from drl.api import (
    API_VERSION,
    BadInput,
    Component,
    StepChoice,
    StepRequest,
    StepStrategy,
    hookimpl,
)
from drl.catalog import Catalog
from drl.options import Options
from drl.testing.contracts.step_strategy import StepStrategyContract

DRL_API = API_VERSION


class FirstOptions(Options):
    """``first``: where the two steps begin."""

    first: int = 3


class Fixed(StepStrategy):
    """An honest strategy: two steps from an option on. The wrong ones change one thing each."""

    def choose(self, request: StepRequest) -> StepChoice:
        first: int = self.options.first
        if first + 2 > request.num_steps:
            raise BadInput(f"sde.fixed.first is {first}; there are {request.num_steps} steps")
        return StepChoice(sde=(first, first + 1), kept=(first, first + 1, first + 2))


class Descending(Fixed):
    def choose(self, request: StepRequest) -> StepChoice:
        return StepChoice(sde=(4, 3), kept=(3, 4, 5))


class Beyond(Fixed):
    """Counts steps from one."""

    def choose(self, request: StepRequest) -> StepChoice:
        last = request.num_steps
        return StepChoice(sde=(last - 1, last), kept=(last - 1, last, last + 1))


class Idle(Fixed):
    def choose(self, request: StepRequest) -> StepChoice:
        return StepChoice(sde=(), kept=())


class Forgetting(Fixed):
    """Keeps where a step starts and not where it leads."""

    def choose(self, request: StepRequest) -> StepChoice:
        return StepChoice(sde=(3, 4), kept=(3, 4))


class Unsorted(Fixed):
    def choose(self, request: StepRequest) -> StepChoice:
        return StepChoice(sde=(3, 4), kept=(5, 4, 3))


class KeepingMore(Fixed):
    """Asks for latents that no sampler of that many steps has."""

    def choose(self, request: StepRequest) -> StepChoice:
        return StepChoice(sde=(3, 4), kept=(3, 4, 5, request.num_steps + 1))


class Dicing(Fixed):
    """Throws dice, which fall alike in every run of the tests."""

    dice: ClassVar[random.Random] = random.Random(1)

    def choose(self, request: StepRequest) -> StepChoice:
        first = self.dice.randrange(request.num_steps - 1)
        return StepChoice(sde=(first,), kept=(first, first + 1))


class Counting(Fixed):
    """Goes on from where it was: a resumed run would choose otherwise."""

    calls = 0

    def choose(self, request: StepRequest) -> StepChoice:
        self.calls += 1
        first = self.calls % 8
        return StepChoice(sde=(first,), kept=(first, first + 1))


class Seeding(Fixed):
    """Seeds torch's own generator, and with it everything else of the process."""

    def choose(self, request: StepRequest) -> StepChoice:
        torch.manual_seed(request.seed)
        first = int(torch.randint(9, ()))
        return StepChoice(sde=(first,), kept=(first, first + 1))


class SeedingNumpy(Fixed):
    def choose(self, request: StepRequest) -> StepChoice:
        np.random.seed(request.seed % 2**32)
        first = int(np.random.randint(9))
        return StepChoice(sde=(first,), kept=(first, first + 1))


class Bending(Fixed):
    """Makes an impossible request possible, without a word."""

    def choose(self, request: StepRequest) -> StepChoice:
        first = min(self.options.first, request.num_steps - 2)
        return StepChoice(sde=(first, first + 1), kept=(first, first + 1, first + 2))


class Vague(Fixed):
    """Refuses without saying which option to change."""

    def choose(self, request: StepRequest) -> StepChoice:
        if self.options.first + 2 > request.num_steps:
            raise BadInput("the steps do not fit")
        return super().choose(request)


RANGE = "test_steps_are_in_range_ascending_and_unique"
KEPT = "test_every_trained_step_has_its_latents_kept"
SAME = "test_the_same_request_gives_the_same_choice"
STATE = "test_global_random_state_is_left_alone"
REFUSAL = "test_an_impossible_request_is_refused_by_the_name_of_the_option"

CASES: list[tuple[type[Fixed], str, str]] = [
    (Descending, RANGE, "[4, 3] == [3, 4]"),
    (Beyond, RANGE, "{9, 10} <= "),
    (Idle, RANGE, "assert ()"),
    (Forgetting, KEPT, "{3, 4, 5} <= {3, 4}"),
    (Unsorted, KEPT, "[5, 4, 3] == [3, 4, 5]"),
    (KeepingMore, KEPT, "11"),
    (Dicing, SAME, "first == again"),
    (Counting, SAME, "StepChoice"),
    (Seeding, STATE, "torch.equal"),
    (SeedingNumpy, STATE, "before[1] == after[1]"),
    (Bending, REFUSAL, "DID NOT RAISE"),
    (Vague, REFUSAL, "'sde.fixed.first' in 'the steps do not fit'"),
]


@hookimpl
def drl_register_step_strategies() -> list[Component]:
    classes = [Fixed, *[case[0] for case in CASES]]
    return offered(classes, config=f"{__name__}:FirstOptions")


class Checks(StepStrategyContract):
    __test__ = False
    component: ClassVar[tuple[str, str]] = ("step_strategy", "fixed")

    @pytest.fixture
    def catalog(self) -> Catalog:
        return plugin_in(__name__)

    @pytest.fixture
    def impossible(self) -> tuple[dict[str, Any], str]:
        return {"first": 9}, "sde.fixed.first"


@pytest.fixture(scope="module")
def verdicts(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Verdict]:
    cases = [(wrong, check) for wrong, check, _ in CASES]
    return judged(Checks, tmp_path_factory.mktemp("checks"), cases, honest=Fixed)


def test_an_honest_strategy_passes_every_check(verdicts: dict[str, Verdict]) -> None:
    found = verdicts["Fixed"]
    assert (found.failed, found.skipped) == ({}, {})
    assert {RANGE, KEPT, SAME, STATE, REFUSAL} <= found.passed


@pytest.mark.parametrize(("wrong", "check", "said"), CASES)
def test_a_wrong_strategy_is_caught(
    verdicts: dict[str, Verdict], wrong: type[Fixed], check: str, said: str
) -> None:
    assert said in verdicts[wrong.__name__].failed[check]


def test_a_strategy_that_fits_every_request_may_say_so(tmp_path: Any) -> None:
    stated = {"capabilities": {"refuses": False}}
    found = judged(Checks, tmp_path, [(Bending, REFUSAL)], honest=Bending, members=stated)
    assert "states refuses = False" in found["Bending"].skipped[REFUSAL]

"""The function contract fails on functions that their slot cannot call, read or use the answer of."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from contract_runs import Verdict, plugin_in, run_classes, subclass
from torch import nn

from drl.api import (
    API_VERSION,
    Component,
    Dropped,
    ForwardInputs,
    Group,
    LossOutput,
    Rollout,
    RolloutRequest,
    Sample,
    Sampling,
    hookimpl,
)
from drl.catalog import Catalog
from drl.kinds import SLOTS
from drl.testing import make_pair, make_prompt, make_sample
from drl.testing.contracts.function import WRONG, FunctionContract, called, same

DRL_API = API_VERSION
SLOT = "rollout.dynamic_sampling_filter"
CALLS: list[int] = []


def spread(run: Any, group: Group) -> bool | Dropped:
    """An honest filter: keeps a group with two different rewards."""
    return len({sample.reward for sample in group.samples}) > 1 or Dropped("equal")


def lonely(group: Group) -> bool:
    return True


async def waiting(run: Any, group: Group) -> bool:
    return True


def decorated(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def inner(*arguments: Any) -> Any:
        return function(*arguments)

    return inner


@decorated
def hidden(run: Any, group: Group) -> bool:
    return True


def wordy(run: Any, group: Group) -> Any:
    return "keep"


def greedy(run: Any, group: Group) -> bool:
    group.samples.pop()
    return True


def moody(run: Any, group: Group) -> bool:
    CALLS.append(1)
    return len(CALLS) % 2 == 0


CALL = "test_its_answer_is_what_the_slot_uses"
SOURCE = "test_its_source_says_what_it_takes"
AGAIN = "test_equal_arguments_give_an_equal_answer"
CASES = [
    (lonely, CALL, "takes 1 argument (group), but is called with (run, group)"),
    (waiting, CALL, "must not be async"),
    (hidden, SOURCE, "decorates hidden"),
    (wordy, CALL, "must be True, False, Dropped(reason) or (bool, reason), got 'keep'"),
    (greedy, CALL, "the group was changed"),
    (moody, AGAIN, "assert"),
]


@hookimpl
def drl_register_functions() -> list[Component]:
    functions: list[Callable[..., Any]] = [spread, *(case[0] for case in CASES)]
    return [
        Component(one.__name__, f"{__name__}:{one.__name__}", summary="Made here.", slot=SLOT)
        for one in functions
    ]


def group_of(*rewards: float, number: int = 0) -> Group:
    samples = [
        make_sample(index=i, group_index=number, member=i, reward=reward)
        for i, reward in enumerate(rewards)
    ]
    return Group(group_index=number, prompt=make_prompt(row=number), samples=samples)


class Checks(FunctionContract):
    __test__ = False
    component: ClassVar[tuple[str, str]] = ("function", "spread")
    slot = SLOT

    @pytest.fixture
    def catalog(self) -> Catalog:
        return plugin_in(__name__)

    @pytest.fixture
    def arguments(self) -> tuple[Any, ...]:
        return None, group_of(0.0, 1.0)


@pytest.fixture(scope="module")
def verdicts(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Verdict]:
    wanted = {"spread": [], **{case[0].__name__: [case[1]] for case in CASES}}
    classes = {f"Test_{name}": subclass(Checks, component=("function", name)) for name in wanted}
    return run_classes(classes, tmp_path_factory.mktemp("checks"), wanted)


def test_an_honest_function_passes_every_check(verdicts: dict[str, Verdict]) -> None:
    found = verdicts["spread"]
    assert (found.failed, found.skipped) == ({}, {})
    assert {case[1] for case in CASES} <= found.passed


@pytest.mark.parametrize(("wrong", "check", "said"), CASES)
def test_a_wrong_function_is_caught(
    verdicts: dict[str, Verdict], wrong: Callable[..., Any], check: str, said: str
) -> None:
    assert said in verdicts[wrong.__name__].failed[check]


def test_a_function_of_chance_says_so(tmp_path: Path) -> None:
    members: dict[str, Any] = {"capabilities": {"repeatable": False}}
    made = subclass(Checks, component=("function", "moody"), **members)
    (found,) = run_classes({"Test_moody": made}, tmp_path, {"moody": [AGAIN]}).values()
    assert "function 'moody' states repeatable = False" in found.skipped[AGAIN]


def test_without_arguments_the_contract_says_what_is_missing(tmp_path: Path) -> None:
    made = subclass(Checks, arguments=vars(FunctionContract)["arguments"])
    (found,) = run_classes({"Test_spread": made}, tmp_path, {"spread": [CALL]}).values()
    assert "must give the fixture arguments" in found.failed[CALL]


def request(*members: int) -> RolloutRequest:
    sampling = Sampling(num_steps=2, height=16, width=16)
    return RolloutRequest(
        prompt=make_prompt(), group_index=0, members=members, seeds=members, sampling=sampling
    )


def change_reward(run: Any, groups: list[Group]) -> None:
    groups[0].samples[0].reward = 9.0


def remove_first(run: Any, groups: list[Group]) -> None:
    groups[0].samples[0].remove_sample = True


async def scores(run: Any, samples: list[Sample]) -> list[float]:
    return [1.0 for _ in samples]


def pop(run: Any, rollout_id: int, buffer: list[Group], count: int) -> list[Group]:
    return [buffer.pop() for _ in range(count)]


def look(run: Any, rollout_id: int, buffer: list[Group], count: int) -> list[Group]:
    return buffer[:count]


TWO = [make_sample(index=0), make_sample(index=1)]
BUFFER = [group_of(0.0, number=n) for n in range(3)]
ROLLOUT = Rollout(rollout_id=0, version=0, groups=[])
NAN = float("nan")


def gives(value: Any) -> Callable[..., Any]:
    return lambda *arguments: value


# slot, arguments, a right function, a wrong one, what is said of it
ANSWERS: list[tuple[str, tuple[Any, ...], Callable[..., Any], Callable[..., Any], str]] = [
    ("model.backend", (), gives(nn.Linear(1, 1)), gives("x"), "must be Module, got str"),
    ("rollout.function", (), gives(ROLLOUT), gives([]), "must be a Rollout"),
    ("eval.function", (), gives({"a": TWO}), gives({"a": [1]}), "no Sample"),
    ("rollout.custom_generate", (None, request(0, 1)), gives(
        [make_sample(member=0), make_sample(member=1)]), gives(TWO), "got [0, 0]"),
    (SLOT, (None, group_of(1.0)), gives((False, "low")), gives((0, "low")), "must be True"),
    ("rollout.sample_filter", (None, [group_of(1.0)]), remove_first, change_reward, "beyond"),
    ("rollout.sample_filter", (None, [group_of(1.0)]), remove_first, gives([]), "return None"),
    ("rollout.buffer_filter", (None, 0, BUFFER, 2), pop, look, "must leave the buffer"),
    ("rollout.buffer_filter", (None, 0, BUFFER, 0), pop, gives(BUFFER), "0 groups at most"),
    ("rollout.buffer_filter", (None, 0, BUFFER, 1), pop, gives(None), "a list of groups"),
    ("rollout.custom_convert", (), gives([[make_pair()]]), gives([[1]]), "drl.api.Pair"),
    ("rollout.custom_expand", (), gives([]), gives([[make_pair()] * 2]), "have one id"),
    ("rollout.custom_log", (), gives(True), gives(None), "must be bool, got NoneType"),
    ("rollout.custom_eval_log", (), gives(False), gives(0), "must be bool, got int"),
    ("algorithm.custom_prepare", (), gives(ForwardInputs(streams={})), gives({}), "got dict"),
    ("algorithm.custom_loss", (), gives(LossOutput(loss=torch.zeros(()), metrics={})),
        gives(torch.zeros(())), "got Tensor"),
    ("reward.custom", (None, TWO), scores, gives([1.0]), "one score per sample (2), got 1"),
    ("reward.custom", (None, TWO), scores, gives([1.0, NAN]), "must be finite, got [nan]"),
    ("reward.custom_post_process", (None, TWO), gives(([1, 2], [0, 1])), gives([1, 2, 3]), "two"),
    ("reward.custom_post_process", (None, TWO), gives(([1, 2], [0, 1])), gives(([1], [0, 1])),
        "one score per sample (2), got 1"),
]  # fmt: skip


@pytest.mark.parametrize(("slot", "arguments", "right", "wrong", "said"), ANSWERS)
def test_what_is_answered_is_compared_with_the_slot(
    slot: str, arguments: tuple[Any, ...], right: Any, wrong: Any, said: str
) -> None:

    for function, words in ((right, ""), (wrong, said)):
        given = copy.deepcopy(arguments)
        found = WRONG[slot](called(function, given), arguments, given)
        assert words in found
        assert bool(found) == bool(words)


def test_every_slot_has_its_check() -> None:
    assert set(WRONG) == {slot.option for slot in SLOTS} == {case[0] for case in ANSWERS}


def test_equal_means_equal_to_the_last_bit() -> None:
    first: list[Any] = [group_of(0.0, 1.0), {"a": torch.ones(2)}, (1, "x"), None]
    second: list[Any] = [group_of(0.0, 1.0), {"a": torch.ones(2)}, (1, "x"), None]
    assert same(first, second)
    second[1]["a"][0] += 2**-23
    assert not same(first, second)
    assert not same(make_pair(seed=0), make_pair(seed=1))
    assert not same([1], (1,))
    assert not same({"a": 1}, {"b": 1})
    assert not same([1], [1, 2])

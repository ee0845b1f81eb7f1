"""``FunctionContract``: what every function keeps, whichever slot it fills."""

from __future__ import annotations

import asyncio
import copy
import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import Field, fields, is_dataclass, replace
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor, nn

from drl.catalog import Catalog
from drl.config.signatures import from_callable, from_source
from drl.testing.contracts.base import ContractBase
from drl.types import Dropped, ForwardInputs, Group, LossOutput, Pair, Rollout, Sample

Arguments = tuple[Any, ...]


class FunctionContract(ContractBase):
    """Its slot can call it, its source shows how, and what it answers is what the slot uses.

    The author states ``slot`` and overrides ``arguments``: what drl would call it with, in order.
    Capability ``repeatable``: equal arguments give an equal answer.
    """

    slot: ClassVar[str]

    @pytest.fixture
    def arguments(self) -> Arguments:
        """The positional arguments of one call; they are copied before each."""
        raise NotImplementedError(f"{type(self).__name__} must give the fixture arguments")

    @pytest.fixture
    def function(self, catalog: Catalog) -> Callable[..., Any]:
        """The function, imported as a run imports it; its slot can call it."""
        return catalog.function(self.slot, self.component[1])

    def test_it_is_offered_for_its_slot(self, catalog: Catalog) -> None:
        found = catalog.find("function", self.component[1], self.slot)
        assert found.component.slot == self.slot

    def test_its_source_says_what_it_takes(
        self, catalog: Catalog, function: Callable[..., Any]
    ) -> None:
        """A recipe is checked without importing it: a plain ``def``, neither decorated nor imported."""
        target = catalog.find("function", self.component[1], self.slot).component.target
        found = catalog.definition(target)
        assert found.function is not None, found.why
        assert from_source(found.function) == from_callable(function)

    def test_its_answer_is_what_the_slot_uses(
        self, function: Callable[..., Any], arguments: Arguments
    ) -> None:
        given = copy.deepcopy(arguments)
        answer = called(function, given)
        assert WRONG[self.slot](answer, arguments, given) == ""

    def test_equal_arguments_give_an_equal_answer(
        self, function: Callable[..., Any], arguments: Arguments
    ) -> None:
        self.require("repeatable")
        first, second = copy.deepcopy(arguments), copy.deepcopy(arguments)
        assert same(called(function, first), called(function, second))
        assert same(first, second)


def called(function: Callable[..., Any], arguments: Arguments) -> Any:
    """Call a function as its slot does, and await what an ``async def`` returns."""
    answer = function(*arguments)
    if not inspect.isawaitable(answer):
        return answer

    async def awaited() -> Any:
        return await answer

    return asyncio.run(awaited())


def same(first: Any, second: Any) -> bool:
    """True when two values hold the same: tensors by their bits, data classes field by field."""
    if type(first) is not type(second):
        return False
    if isinstance(first, Tensor):
        return torch.equal(first, second)
    if is_dataclass(first):
        return all(same(value_of(first, f), value_of(second, f)) for f in fields(first))
    if isinstance(first, Mapping):
        return first.keys() == second.keys() and all(same(first[k], second[k]) for k in first)
    if isinstance(first, Sequence) and not isinstance(first, str):
        return len(first) == len(second) and all(map(same, first, second))
    return bool(first == second) or first is second


def value_of(instance: Any, field: Field[Any]) -> Any:
    """Return the value of a data class's field, also of one with slots."""
    return object.__getattribute__(instance, field.name)


def wrong_verdict(answer: Any, before: Arguments, after: Arguments) -> str:
    """Say what keeps an answer from deciding about a group; the group must stay as it was."""
    pair = isinstance(answer, tuple) and [type(part) for part in answer] == [bool, str]
    if not (isinstance(answer, bool | Dropped) or pair):
        return f"must be True, False, Dropped(reason) or (bool, reason), got {answer!r}"
    return "" if same(before[1], after[1]) else "the group was changed"


def wrong_removal(answer: Any, before: Arguments, after: Arguments) -> str:
    """Say what a sample filter did besides marking samples as removed."""
    if answer is not None:
        return f"marks samples in place and must return None, got {answer!r}"
    for old, new in zip(before[1], after[1], strict=True):
        restored = [replace(sample, removed=False) for sample in new.samples]
        if not same([replace(sample, removed=False) for sample in old.samples], restored):
            return f"group {old.group_index} was changed beyond sample.remove_sample"
    return ""


def wrong_choice(answer: Any, before: Arguments, after: Arguments) -> str:
    """Say what is wrong with the groups that left a buffer, and with what stayed in it."""
    _, _, buffer, count = before
    if not isinstance(answer, list) or not all(isinstance(one, Group) for one in answer):
        return f"must be a list of groups, got {answer!r}"
    if len(answer) > count:
        return f"must be {count} groups at most, got {len(answer)}"
    both = sorted(group.group_index for group in (*answer, *after[2]))
    if both != sorted(group.group_index for group in buffer):
        return "a group that was chosen must leave the buffer, and no other may"
    return ""


def wrong_scores(answer: Any, before: Arguments, after: Arguments) -> str:
    """Say what keeps an answer from being a score per sample."""
    samples = before[1]
    if len(answer) != len(samples):
        return f"must be one score per sample ({len(samples)}), got {len(answer)}"
    odd = [score for score in answer if not math.isfinite(float(score))]
    return f"must be finite, got {odd}" if odd else ""


def wrong_rewards(answer: Any, before: Arguments, after: Arguments) -> str:
    """Say what keeps an answer from being raw and normalised rewards."""
    if not isinstance(answer, tuple | list) or len(answer) != 2:
        return f"must be two lists, raw and normalised rewards, got {answer!r}"
    said = (wrong_scores(values, before, after) for values in answer)
    return next(filter(None, said), "")


def wrong_units(answer: Any, before: Arguments, after: Arguments) -> str:
    """Say what keeps an answer from being units of pairs with an id each."""
    pairs = [pair for unit in answer for pair in unit]
    if not all(isinstance(pair, Pair) for pair in pairs):
        return "must be lists of drl.api.Pair, one list per unit"
    ids = [pair.id for pair in pairs]
    return "" if len(set(ids)) == len(ids) else "two pairs have one id"


def wrong_rollout(answer: Any, before: Arguments, after: Arguments) -> str:
    """Say what keeps an answer from being a rollout or the samples of evaluation sets."""
    if isinstance(answer, Rollout):
        return ""
    if not isinstance(answer, Mapping):
        return f"must be a Rollout, or samples by evaluation set, got {type(answer).__name__}"
    samples = [sample for one in answer.values() for sample in one]
    return "" if all(isinstance(s, Sample) for s in samples) else "a set holds what is no Sample"


def wrong_samples(answer: Any, before: Arguments, after: Arguments) -> str:
    """Say what keeps an answer from being the samples of a request."""
    request = before[1]
    members = [sample.member for sample in answer if isinstance(sample, Sample)]
    if members != list(request.members):
        return f"must be samples of the members {request.members} in this order, got {members}"
    return ""


def is_a(wanted: type) -> Callable[[Any, Arguments, Arguments], str]:
    """Return a check that an answer is of one type."""

    def wrong_type(answer: Any, before: Arguments, after: Arguments) -> str:
        if isinstance(answer, wanted):
            return ""
        return f"must be {wanted.__name__}, got {type(answer).__name__}"

    return wrong_type


WRONG: Mapping[str, Callable[[Any, Arguments, Arguments], str]] = {
    "model.backend": is_a(nn.Module),
    "rollout.function": wrong_rollout,
    "rollout.custom_generate": wrong_samples,
    "rollout.dynamic_sampling_filter": wrong_verdict,
    "rollout.sample_filter": wrong_removal,
    "rollout.buffer_filter": wrong_choice,
    "rollout.custom_convert": wrong_units,
    "rollout.custom_expand": wrong_units,
    "rollout.custom_log": is_a(bool),
    "rollout.custom_eval_log": is_a(bool),
    "eval.function": wrong_rollout,
    "algorithm.custom_prepare": is_a(ForwardInputs),
    "algorithm.custom_loss": is_a(LossOutput),
    "reward.custom": wrong_scores,
    "reward.custom_post_process": wrong_rewards,
}
"""By slot, what says in words what is wrong with an answer: given the arguments before and after."""

"""The contract of data sources, where a filter chooses from the buffer and prompts are known beforehand."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import pytest

from drl.builtin.prompt_buffer import PromptBuffer
from drl.interfaces.data import BufferChoice, DataSource
from drl.testing.contracts.data_source import DataSourceContract
from drl.types import Context, Group, Prompt


class Three(DataSource):
    """Three rows for ever, with a buffer of groups."""

    def __init__(self, options: Any = None, context: Context | None = None) -> None:
        super().__init__(options, context or Context())
        self.position, self.buffer = 0, PromptBuffer()

    def take(self, count: int) -> list[Prompt]:
        first = self.buffer.take(count)
        return [*first, *(self._next() for _ in range(count - len(first)))]

    def _next(self) -> Prompt:
        self.position += 1
        return self._prompt(self.position - 1)

    def _prompt(self, place: int) -> Prompt:
        return Prompt(row=place % 3, epoch=place // 3, text=f"row {place % 3}")

    def give_back(self, groups: Sequence[Group]) -> None:
        self.buffer.add(groups)

    def use_buffer_filter(self, choose: BufferChoice) -> None:
        self.buffer.choose = choose

    def known_prompts(self) -> Sequence[Prompt]:
        return [self._prompt(place) for place in range(3)]

    def rows(self) -> int:
        return 3

    def state(self) -> dict[str, Any]:
        return {"position": self.position, "buffer": self.buffer.state()}

    def restore(self, state: Mapping[str, Any]) -> None:
        self.position = state["position"]


class Deaf(Three):
    """Takes a filter and does not ask it."""

    def use_buffer_filter(self, choose: BufferChoice) -> None:
        return


class Refusing(Three):
    """Has a buffer with an order of its own."""

    def use_buffer_filter(self, choose: BufferChoice) -> None:
        DataSource.use_buffer_filter(self, choose)


class Forgetful(Three):
    """Knows fewer prompts than it gives."""

    def known_prompts(self) -> Sequence[Prompt]:
        return [self._prompt(0)]


class Moving(Three):
    """Looks at its prompts by drawing them."""

    def known_prompts(self) -> Sequence[Prompt]:
        return self.take(3)


class Ignorant(Three):
    """Does not know its prompts beforehand."""

    def known_prompts(self) -> Sequence[Prompt]:
        return ()


class Checks(DataSourceContract):
    """The contract, called by hand."""

    __test__ = False
    capabilities: ClassVar[Mapping[str, bool]] = {"file": False}


def test_an_honest_source_passes() -> None:
    Checks().test_a_buffer_filter_says_which_group_comes_first(Three())
    Checks().test_known_prompts_are_those_of_an_epoch(Three)


def test_a_filter_that_is_not_asked_is_caught() -> None:
    with pytest.raises(AssertionError):
        Checks().test_a_buffer_filter_says_which_group_comes_first(Deaf())


@pytest.mark.parametrize("broken", [Forgetful, Moving])
def test_a_source_that_knows_other_prompts_or_moves_on_is_caught(broken: type[Three]) -> None:
    with pytest.raises(AssertionError):
        Checks().test_known_prompts_are_those_of_an_epoch(broken)


def test_a_source_may_do_without_either() -> None:
    with pytest.raises(pytest.skip.Exception, match="an order of its own"):
        Checks().test_a_buffer_filter_says_which_group_comes_first(Refusing())
    with pytest.raises(pytest.skip.Exception, match="does not know its prompts"):
        Checks().test_known_prompts_are_those_of_an_epoch(Ignorant)

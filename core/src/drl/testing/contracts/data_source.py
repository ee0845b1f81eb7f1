"""``DataSourceContract``: nothing is lost, nothing is doubled, and a resume goes on exactly."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from drl.errors import DataError
from drl.interfaces.data import DataSource
from drl.testing.contracts.base import ContractBase
from drl.types import Group, Prompt

Identity = tuple[int, int, str]


class DataSourceContract(ContractBase):
    """The author overrides ``section``, and ``empty_section`` for a source that reads a file.

    Capabilities: ``epochs`` (``rows()`` is a number), ``buffer`` (takes groups back), ``file`` (its
    data can be empty).
    """

    @pytest.fixture
    def make(self, catalog: Any, options: Any, context: Any) -> Callable[[], DataSource]:
        """Makes the same source again, as a resumed run does."""
        return lambda: catalog.create(*self.component, options, context)

    @pytest.fixture
    def empty_section(self) -> Any:
        """A section whose data holds no row."""
        raise NotImplementedError(f"{type(self).__name__} must give the fixture empty_section")

    def test_gives_as_many_as_asked(self, instance: DataSource) -> None:
        assert [len(instance.take(count)) for count in (1, 0, 3)] == [1, 0, 3]

    def test_two_sources_give_the_same_prompts(self, make: Callable[[], DataSource]) -> None:
        assert drawn(make(), 12) == drawn(make(), 12)

    @pytest.mark.parametrize("size", [1, 3, 4])
    def test_piece_by_piece_is_the_same_as_at_once(
        self, make: Callable[[], DataSource], size: int
    ) -> None:
        source = make()
        assert [one for _ in range(12 // size) for one in drawn(source, size)] == drawn(make(), 12)

    def test_every_epoch_holds_every_row_once(self, instance: DataSource) -> None:
        self.require("epochs")
        rows = epoch_length(instance)
        epochs = [instance.take(rows) for _ in range(3)]
        assert all(len({prompt.row for prompt in epoch}) == rows for epoch in epochs)
        assert [{prompt.epoch for prompt in epoch} for epoch in epochs] == [{0}, {1}, {2}]

    def test_one_take_may_span_epochs(self, make: Callable[[], DataSource]) -> None:
        self.require("epochs")
        rows = epoch_length(make())
        source = make()
        by_epoch = [one for _ in range(3) for one in drawn(source, rows)]
        assert drawn(make(), 3 * rows) == by_epoch

    @pytest.mark.parametrize("taken", range(0, 13, 3))
    def test_a_restored_source_goes_on_exactly(
        self, make: Callable[[], DataSource], taken: int
    ) -> None:
        source = make()
        source.take(taken)
        state = json.loads(json.dumps(source.state()))
        resumed = make()
        resumed.restore(state)
        assert drawn(resumed, 11) == drawn(source, 11)

    def test_restoring_twice_goes_on_exactly(self, make: Callable[[], DataSource]) -> None:
        straight = drawn(make(), 12)
        pieces: list[Identity] = []
        state = None
        for _ in range(3):
            source = make()
            if state is not None:
                source.restore(state)
            pieces += drawn(source, 4)
            state = json.loads(json.dumps(source.state()))
        assert pieces == straight

    def test_a_state_is_not_changed_by_going_on(self, instance: DataSource) -> None:
        state = instance.state()
        before = json.dumps(state)
        instance.take(3)
        assert json.dumps(state) == before

    def test_groups_given_back_come_first(self, instance: DataSource) -> None:
        self.require("buffer")
        first = instance.take(4)
        instance.give_back(list(groups_of(first[1:3])))
        assert [identity(one) for one in instance.take(2)] == [identity(one) for one in first[1:3]]

    def test_groups_given_back_survive_a_resume(self, make: Callable[[], DataSource]) -> None:
        self.require("buffer")
        source = make()
        source.give_back(list(groups_of(source.take(3)[:2])))
        resumed = make()
        resumed.restore(json.loads(json.dumps(source.state())))
        assert drawn(resumed, 6) == drawn(source, 6)

    def test_a_buffer_filter_says_which_group_comes_first(self, instance: DataSource) -> None:
        self.require("buffer")
        given = instance.take(3)
        instance.give_back(list(groups_of(given)))
        try:
            instance.use_buffer_filter(lambda buffer, count: [buffer.pop() for _ in range(count)])
        except DataError:
            pytest.skip("its buffer keeps an order of its own")
        assert [identity(one) for one in instance.take(2)] == [
            identity(one) for one in given[:0:-1]
        ]

    def test_known_prompts_are_those_of_an_epoch(self, make: Callable[[], DataSource]) -> None:
        source = make()
        known = {identity(prompt) for prompt in source.known_prompts()}
        if not known:
            pytest.skip("it does not know its prompts beforehand")
        assert known == set(drawn(source, epoch_length(source)))

    def test_a_source_without_buffer_refuses_groups(self, instance: DataSource) -> None:
        if self.capabilities.get("buffer", True):
            pytest.skip("it keeps a buffer")
        with pytest.raises(DataError):
            instance.give_back(list(groups_of(instance.take(1))))

    def test_refuses_empty_data(
        self, catalog: Any, options: Any, context: Any, request: pytest.FixtureRequest
    ) -> None:
        self.require("file")
        import dataclasses

        empty = dataclasses.replace(context, section=request.getfixturevalue("empty_section"))
        with pytest.raises(DataError):
            catalog.create(*self.component, options, empty)


def identity(prompt: Prompt) -> Identity:
    """Return what tells a prompt apart; metadata may not be hashable."""
    return prompt.row, prompt.epoch, prompt.text


def drawn(source: DataSource, count: int) -> list[Identity]:
    """Take prompts and return their identities."""
    return [identity(prompt) for prompt in source.take(count)]


def epoch_length(source: DataSource) -> int:
    """Return ``rows()``, which a source with epochs knows."""
    rows = source.rows()
    assert rows is not None
    return rows


def groups_of(prompts: list[Prompt]) -> Iterator[Group]:
    """Wrap prompts as the groups that a rollout drew from them."""
    for index, prompt in enumerate(prompts):
        yield Group(group_index=index, prompt=prompt, samples=[])

"""The data source contract fails on sources that lose, double or forget prompts."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

import pytest

from drl.api import Context, DataSource, Group, Prompt
from drl.testing.contracts.data_source import DataSourceContract

ROWS = 5


class Counting(DataSource):
    """An honest source of five rows, without a buffer."""

    def __init__(self, options: Any, context: Context) -> None:
        super().__init__(options, context)
        self.position = 0

    def take(self, count: int) -> list[Prompt]:
        numbers = range(self.position, self.position + count)
        self.position += count
        return [self.prompt(number) for number in numbers]

    def prompt(self, number: int) -> Prompt:
        epoch, row = divmod(number, ROWS)
        return Prompt(row=row, text=f"row {row}", epoch=epoch)

    def rows(self) -> int:
        return ROWS

    def state(self) -> dict[str, Any]:
        return {"position": self.position}

    def restore(self, state: Mapping[str, Any]) -> None:
        self.position = state["position"]


class Forgetful(Counting):
    """Goes to the start of the epoch on resume."""

    def restore(self, state: Mapping[str, Any]) -> None:
        self.position = state["position"] // ROWS * ROWS


class Dropping(Counting):
    """Leaves the rest of an epoch when a draw does not fit into it."""

    def take(self, count: int) -> list[Prompt]:
        if self.position % ROWS + count > ROWS:
            self.position = -(-self.position // ROWS) * ROWS
        return super().take(count)


class Doubling(Counting):
    """Repeats its first row."""

    def prompt(self, number: int) -> Prompt:
        return super().prompt(number - number % ROWS if number % ROWS == 1 else number)


class Short(Counting):
    """Does not wrap into the next epoch."""

    def take(self, count: int) -> list[Prompt]:
        return super().take(min(count, ROWS - self.position % ROWS))


class Sharing(Counting):
    """Hands out the dictionary that it goes on writing to."""

    def __init__(self, options: Any, context: Context) -> None:
        super().__init__(options, context)
        self.shared: dict[str, Any] = {}

    def state(self) -> dict[str, Any]:
        return self.shared

    def take(self, count: int) -> list[Prompt]:
        found = super().take(count)
        self.shared["position"] = self.position
        return found


class Checks(DataSourceContract):
    """The contract, called by hand."""

    __test__ = False
    component: ClassVar[tuple[str, str]] = ("data_source", "counting")
    capabilities: ClassVar[Mapping[str, bool]] = {"buffer": False, "file": False}


Make = Callable[[], DataSource]
CHECKS: dict[str, Callable[[Checks, Make], None]] = {
    "count": lambda c, make: c.test_gives_as_many_as_asked(make()),
    "same": lambda c, make: c.test_two_sources_give_the_same_prompts(make),
    "pieces": lambda c, make: c.test_piece_by_piece_is_the_same_as_at_once(make, 3),
    "epochs": lambda c, make: c.test_every_epoch_holds_every_row_once(make()),
    "span": lambda c, make: c.test_one_take_may_span_epochs(make),
    "resume": lambda c, make: c.test_a_restored_source_goes_on_exactly(make, 3),
    "resume_twice": lambda c, make: c.test_restoring_twice_goes_on_exactly(make),
    "state": lambda c, make: c.test_a_state_is_not_changed_by_going_on(make()),
    "no_buffer": lambda c, make: c.test_a_source_without_buffer_refuses_groups(make()),
}


@pytest.mark.parametrize("name", sorted(CHECKS))
def test_an_honest_source_passes(name: str) -> None:
    CHECKS[name](Checks(), lambda: Counting(None, Context()))


@pytest.mark.parametrize(
    ("broken", "name"),
    [
        (Forgetful, "resume"),
        (Forgetful, "resume_twice"),
        (Dropping, "pieces"),
        (Doubling, "epochs"),
        (Short, "span"),
        (Sharing, "state"),
    ],
)
def test_a_broken_source_is_caught(broken: type[DataSource], name: str) -> None:
    with pytest.raises(AssertionError):
        CHECKS[name](Checks(), lambda: broken(None, Context()))


class Buffered(Counting):
    """An honest source that takes groups back."""

    def __init__(self, options: Any, context: Context) -> None:
        super().__init__(options, context)
        self.returned: list[Prompt] = []

    def take(self, count: int) -> list[Prompt]:
        first, self.returned = self.returned[:count], self.returned[count:]
        return [*first, *super().take(count - len(first))]

    def give_back(self, groups: Sequence[Group]) -> None:
        self.returned.extend(group.prompt for group in groups)

    def state(self) -> dict[str, Any]:
        kept = [[one.row, one.epoch, one.text] for one in self.returned]
        return {**super().state(), "returned": kept}

    def restore(self, state: Mapping[str, Any]) -> None:
        super().restore(state)
        self.returned = [
            Prompt(row=row, epoch=epoch, text=text) for row, epoch, text in state["returned"]
        ]


class Swallowing(Buffered):
    """Takes groups back and never gives them out."""

    def give_back(self, groups: Sequence[Group]) -> None:
        return


class Queueing(Buffered):
    """Gives what came back out last."""

    def take(self, count: int) -> list[Prompt]:
        return Counting.take(self, count)


class Stacking(Buffered):
    """Turns the order round."""

    def give_back(self, groups: Sequence[Group]) -> None:
        super().give_back(list(reversed(groups)))


class Careless(Buffered):
    """Leaves what came back out of its state."""

    def state(self) -> dict[str, Any]:
        return {**super().state(), "returned": []}


class Lenient(Counting):
    """Has no buffer and takes groups all the same."""

    def give_back(self, groups: Sequence[Group]) -> None:
        return


class Endless(Counting):
    """Gives a prompt more than it was asked for."""

    def take(self, count: int) -> list[Prompt]:
        return super().take(count + 1)


class Moody(Counting):
    """Starts somewhere else every time."""

    starts = 0

    def __init__(self, options: Any, context: Context) -> None:
        super().__init__(options, context)
        Moody.starts += 1
        self.position = Moody.starts


class Boundless(Counting):
    """Claims epochs and does not know how long they are."""

    def rows(self) -> None:  # type: ignore[override]
        return None


class BufferedChecks(Checks):
    """The contract for a source with a buffer, called by hand."""

    __test__ = False
    capabilities: ClassVar[Mapping[str, bool]] = {"file": False}


BUFFER: dict[str, Callable[[Checks, Make], None]] = {
    "first": lambda c, make: c.test_groups_given_back_come_first(make()),
    "survive": lambda c, make: c.test_groups_given_back_survive_a_resume(make),
}


@pytest.mark.parametrize("name", sorted({**CHECKS, **BUFFER}.keys() - {"no_buffer"}))
def test_an_honest_source_with_a_buffer_passes(name: str) -> None:
    {**CHECKS, **BUFFER}[name](BufferedChecks(), lambda: Buffered(None, Context()))


@pytest.mark.parametrize(
    ("broken", "name"),
    [
        (Swallowing, "first"),
        (Queueing, "first"),
        (Stacking, "first"),
        (Careless, "survive"),
        (Endless, "count"),
        (Moody, "same"),
        (Boundless, "epochs"),
    ],
)
def test_a_source_that_loses_what_came_back_or_counts_wrongly_is_caught(
    broken: type[DataSource], name: str
) -> None:
    with pytest.raises(AssertionError):
        {**CHECKS, **BUFFER}[name](BufferedChecks(), lambda: broken(None, Context()))


def test_a_source_that_states_no_buffer_must_refuse_groups() -> None:
    with pytest.raises(pytest.fail.Exception, match="DID NOT RAISE"):
        CHECKS["no_buffer"](Checks(), lambda: Lenient(None, Context()))


@pytest.mark.parametrize(("checks", "name"), [(Checks, "first"), (BufferedChecks, "no_buffer")])
def test_what_a_source_states_decides_what_is_asked(checks: type[Checks], name: str) -> None:
    with pytest.raises(pytest.skip.Exception, match=r"states buffer = False|it keeps a buffer"):
        {**CHECKS, **BUFFER}[name](checks(), lambda: Buffered(None, Context()))

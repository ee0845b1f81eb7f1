"""The cursor: every row once per epoch, and a resume that goes on at any position."""

from __future__ import annotations

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from drl.mathematics.epochs import EpochCursor, shuffled
from drl.types import Context


def plain(rows: int) -> EpochCursor:
    return EpochCursor(rows, lambda epoch: range(rows))


def taken(cursor: EpochCursor, count: int) -> list[tuple[int, int]]:
    return [cursor.next() for _ in range(count)]


def test_rows_come_in_order_and_epochs_are_counted() -> None:
    assert taken(plain(3), 7) == [(0, 0), (1, 0), (2, 0), (0, 1), (1, 1), (2, 1), (0, 2)]
    assert taken(plain(1), 3) == [(0, 0), (0, 1), (0, 2)]


def test_the_end_of_an_epoch_is_a_position_of_that_epoch() -> None:
    cursor = plain(3)
    assert cursor.state() == {"epoch": 0, "position": 0}
    taken(cursor, 3)
    assert cursor.state() == {"epoch": 0, "position": 3}
    assert cursor.next() == (0, 1)
    assert cursor.state() == {"epoch": 1, "position": 1}


@settings(deadline=None)
@given(st.integers(1, 9), st.integers(0, 40), st.integers(0, 20), st.integers(0, 5))
def test_a_restored_cursor_goes_on_as_if_nothing_had_been(
    rows: int, before: int, after: int, seed: int
) -> None:
    order_of = shuffled(Context(seed=seed), "test", rows)
    straight = EpochCursor(rows, order_of)
    taken(straight, before)
    state = json.loads(json.dumps(straight.state()))
    resumed = EpochCursor(rows, order_of)
    taken(resumed, 2)
    resumed.restore(state)
    assert resumed.state() == state
    assert taken(resumed, after) == taken(straight, after)


@settings(deadline=None)
@given(st.integers(1, 30), st.integers(0, 3))
def test_a_shuffled_epoch_is_a_permutation_that_seed_and_epoch_decide(rows: int, seed: int) -> None:
    order_of = shuffled(Context(seed=seed), "test", rows)
    for epoch in range(3):
        assert sorted(order_of(epoch)) == list(range(rows))
        assert order_of(epoch) == shuffled(Context(seed=seed, rank=3, world=4), "test", rows)(epoch)


def test_epochs_seeds_and_purposes_have_orders_of_their_own() -> None:
    orders = {
        tuple(shuffled(Context(seed=seed), purpose, 20)(epoch))
        for seed in (0, 1)
        for purpose in ("data", "other")
        for epoch in (0, 1)
    }
    assert len(orders) == 8


@pytest.mark.parametrize(
    "state", [{"epoch": "2", "position": "1"}, {"epoch": 2.0, "position": 1.0}]
)
def test_numbers_of_a_state_may_have_gone_through_text(state: dict[str, object]) -> None:
    cursor = plain(3)
    cursor.restore(state)
    assert cursor.next() == (1, 2)

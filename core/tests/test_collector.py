"""What stays is left out of collections, and comes back at the end."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest

from drl.collector import LongLived


class Node:
    """Something that can be in a cycle."""

    other: Any = None


def cycle() -> weakref.ref[Node]:
    node = Node()
    node.other = node
    return weakref.ref(node)


@pytest.mark.usefixtures("impatient")
def test_garbage_goes_first_and_what_comes_later_is_collected() -> None:
    before = cycle()
    kept = Node()
    with LongLived() as loop:
        loop.settle()
        assert before() is None
        assert gc.get_freeze_count() > 0
        later = cycle()
        gc.collect()
        assert later() is None
        alone = weakref.ref(kept)
        del kept
        assert alone() is None, "the last reference frees what was set aside"
    assert gc.get_freeze_count() == 0


@pytest.mark.usefixtures("impatient")
def test_a_cycle_of_what_was_set_aside_is_collected_at_the_end() -> None:
    node = Node()
    node.other = node
    held = weakref.ref(node)
    try:
        with LongLived() as loop:
            loop.settle()
            del node
            gc.collect()
            assert held() is not None
            raise KeyboardInterrupt
    except KeyboardInterrupt:
        gc.collect()
    assert held() is None


def test_a_short_loop_and_one_that_never_began_set_nothing_aside() -> None:
    LongLived().settle()
    before = gc.get_freeze_count()
    with LongLived() as loop:
        loop.settle()
        assert gc.get_freeze_count() == before


@pytest.mark.usefixtures("impatient")
def test_what_somebody_else_set_aside_stays_so() -> None:
    gc.freeze()
    before = gc.get_freeze_count()
    with LongLived() as loop:
        kept = [Node() for _ in range(1000)]
        loop.settle()
        assert gc.get_freeze_count() <= before
    assert len(kept) == 1000
    assert gc.get_freeze_count() > 0


@pytest.mark.usefixtures("impatient")
def test_it_is_done_once() -> None:
    with LongLived() as loop:
        loop.settle()
        count = gc.get_freeze_count()
        kept = [Node() for _ in range(100)]
        loop.settle()
        assert gc.get_freeze_count() <= count
        assert len(kept) == 100
    assert gc.get_freeze_count() == 0

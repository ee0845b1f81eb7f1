"""Buckets of whole units."""

from __future__ import annotations

from collections.abc import Iterator

from hypothesis import given
from hypothesis import strategies as st

from drl.mathematics.packing import neighbours, pack_by_size


def packed(sizes: list[int], limit: int) -> list[list[int]]:
    return list(pack_by_size(sizes, lambda size: size, limit))


def test_reaching_or_exceeding_the_limit_flushes_first() -> None:
    assert packed([4, 5, 1, 10, 3, 7], 10) == [[4, 5], [1], [10], [3], [7]]


def test_a_unit_of_the_limit_or_more_travels_alone() -> None:
    assert packed([1, 12, 2], 10) == [[1], [12], [2]]
    assert packed([10], 10) == [[10]]


def test_empty_units_and_no_units_give_no_bucket() -> None:
    assert packed([0, 0], 10) == []
    assert packed([], 10) == []
    assert packed([0, 3, 0, 4], 10) == [[3, 4]]


def test_units_are_taken_no_further_than_the_bucket_needs() -> None:
    """Gathering the next unit is expensive: one unit of look-ahead, no more."""
    taken: list[int] = []

    def units() -> Iterator[int]:
        for size in [6, 6, 6, 6]:
            taken.append(size)
            yield size

    buckets = pack_by_size(units(), lambda size: size, 10)
    assert next(buckets) == [6]
    assert len(taken) == 2


def test_units_may_be_anything_with_a_size() -> None:
    names = ["a" * 3, "b" * 4, "c" * 5]
    assert list(pack_by_size(names, len, 8)) == [["aaa", "bbbb"], ["ccccc"]]


@given(st.lists(st.integers(0, 30)), st.integers(1, 25))
def test_nothing_is_lost_split_or_reordered_and_buckets_stay_below_the_limit(
    sizes: list[int], limit: int
) -> None:
    buckets = packed(sizes, limit)
    assert [size for bucket in buckets for size in bucket] == [size for size in sizes if size]
    assert all(sum(bucket) < limit or len(bucket) == 1 for bucket in buckets)
    heads = [bucket[0] for bucket in buckets[1:]]
    assert all(sum(bucket) + head >= limit for bucket, head in zip(buckets, heads, strict=False))


def test_neighbours_of_one_kind_stay_together_and_none_is_left_out() -> None:
    items = [("a", 3), ("a", 0), ("a", 4), ("b", 1), ("a", 9), ("a", 0), ("a", 8)]
    found = list(neighbours(items, lambda item: item[1], 7, lambda item: item[0]))
    assert found == [items[:3], items[3:4], items[4:5], items[5:6], items[6:]]
    whole = list(neighbours(items, lambda item: item[1], 100))
    assert whole == [items]
    assert list(neighbours([], len, 1)) == []

"""Segments of a GPU's allocator, by hand."""

from __future__ import annotations

from drl.plan.allocator import MIB, Block, Segments


def test_small_blocks_share_a_segment_of_their_own() -> None:
    segments = Segments()
    blocks = [segments.take(MIB // 2) for _ in range(4)]
    assert segments.reserved == 2 * MIB
    assert [(one.segment, one.start, one.end) for one in blocks] == [
        (1, number * MIB // 2, (number + 1) * MIB // 2) for number in range(4)
    ]
    segments.take(512)
    assert segments.reserved == 4 * MIB
    segments.take(MIB + 512)
    assert segments.reserved == 24 * MIB


def test_large_blocks_have_their_own_segment_in_steps_of_two_mib() -> None:
    segments = Segments()
    segments.take(10 * MIB)
    assert segments.reserved == 10 * MIB
    segments.take(10 * MIB + 512)
    assert segments.reserved == 22 * MIB
    segments.take(10 * MIB - 512)
    assert segments.reserved == 42 * MIB


def test_what_is_given_back_is_used_again_by_the_best_fit() -> None:
    segments = Segments()
    large, fit = segments.take(64 * MIB), segments.take(16 * MIB)
    segments.give_back(large)
    segments.give_back(fit)
    again = segments.take(15 * MIB)
    assert (again.segment, again.size) == (2, 16 * MIB)  # one MiB left over is not split off
    split = segments.take(16 * MIB)
    assert (split.segment, split.size) == (1, 16 * MIB)
    assert segments.take(48 * MIB) == Block(1, 16 * MIB, 64 * MIB, small=False)
    assert segments.reserved == 80 * MIB


def test_free_neighbours_become_one_block() -> None:
    segments = Segments()
    whole = segments.take(30 * MIB)
    segments.give_back(whole)
    first, second, third = (segments.take(10 * MIB) for _ in range(3))
    for one in (first, third, second):
        segments.give_back(one)
    assert segments.take(30 * MIB).size == 30 * MIB
    assert segments.reserved == 30 * MIB


def test_memory_in_pieces_makes_a_request_reserve_more() -> None:
    """What a peak alone would not tell: 60 MiB are asked for at most, 90 are reserved."""
    segments = Segments()
    pieces = [segments.take(20 * MIB) for _ in range(3)]
    for one in (pieces[0], pieces[2]):
        segments.give_back(one)
    segments.take(30 * MIB)
    assert segments.reserved == 90 * MIB

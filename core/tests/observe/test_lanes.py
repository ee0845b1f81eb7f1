"""Time spans of an iteration: booked, kept, read back, drawn."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from drl.observe.lanes import (
    FILE_NAME,
    LEFT,
    RIGHT,
    Block,
    draw_lanes,
    joined,
    read_timelines,
    record_timeline,
    shared_seconds,
)
from drl.observe.timing import Phases, Span, Timeline

PLACES = st.integers(0, 30)
SPANS = st.lists(st.tuples(PLACES, PLACES).map(lambda pair: (min(pair), max(pair))), max_size=6)


class Hand:
    """A clock that a test moves by hand."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def test_a_timeline_says_when_each_phase_ran_and_what_ran_beside_it() -> None:
    hand = Hand()
    phases = Phases(hand)
    hand.now += 0.5
    with phases.phase("rollout"):
        hand.now += 1.0
        with phases.phase("encode"):
            hand.now += 2.0
        hand.now += 3.0
    phases.overlap("reward", 1.5, [(102.0, 103.5)])
    phases.overlap("save", 0.25)
    phases.finish()
    assert phases.timeline == Timeline(
        seconds=6.5,
        phases={"rollout": ((0.5, 1.5), (3.5, 6.5)), "encode": ((1.5, 3.5),)},
        beside={"reward": ((2.0, 3.5),)},
    )


def test_the_next_timeline_begins_where_the_one_before_ended() -> None:
    hand = Hand()
    phases = Phases(hand)
    with phases.phase("train"):
        hand.now += 2.0
    phases.finish()
    hand.now += 1.0
    with phases.phase("train"):
        hand.now += 4.0
    phases.finish()
    assert phases.timeline == Timeline(seconds=5.0, phases={"train": ((1.0, 5.0),)})


def test_spans_that_touch_become_one_and_others_do_not() -> None:
    assert joined([(4.0, 5.0), (0.0, 1.0), (1.0, 2.0), (4.5, 4.7)]) == [(0.0, 2.0), (4.0, 5.0)]
    assert joined([(0.0, 1.0), (1.2, 2.0), (3.0, 4.0)], gap=0.2) == [(0.0, 2.0), (3.0, 4.0)]
    assert joined([]) == []


@given(SPANS, SPANS)
def test_shared_time_is_counted_second_by_second(one: list[Span], other: list[Span]) -> None:
    def seconds(spans: list[Span]) -> set[int]:
        return {second for begin, end in spans for second in range(int(begin), int(end))}

    assert shared_seconds(one, other) == len(seconds(one) & seconds(other))


def test_what_is_recorded_is_read_back(tmp_path: Path) -> None:
    first = Timeline(
        seconds=4.0,
        phases={"rollout": ((0.0, 2.0),), "train": ((2.5, 4.0),)},
        beside={"reward": ((1.0, 1.5), (1.75, 2.0))},
    )
    record_timeline(tmp_path, 0, first)
    record_timeline(tmp_path, 1, Timeline(seconds=1.0))
    assert read_timelines(tmp_path) == ({0: first, 1: Timeline(seconds=1.0)}, [])


def test_gaps_that_no_picture_shows_are_not_kept(tmp_path: Path) -> None:
    busy = tuple((number / 1000, number / 1000 + 0.0009) for number in range(1000))
    record_timeline(tmp_path, 3, Timeline(seconds=1.0, beside={"generate": busy}))
    found, _ = read_timelines(tmp_path)
    assert found[3].beside == {"generate": ((0.0, 0.9999),)}
    assert (tmp_path / FILE_NAME).stat().st_size < 200


def test_an_iteration_that_was_done_again_counts_as_it_was_last(tmp_path: Path) -> None:
    for step, seconds in ((0, 1.0), (1, 2.0), (1, 3.0)):
        record_timeline(tmp_path, step, Timeline(seconds=seconds))
    found, remarks = read_timelines(tmp_path)
    assert {step: timeline.seconds for step, timeline in found.items()} == {0: 1.0, 1: 3.0}
    assert remarks == []


def test_a_run_without_the_file_has_no_timelines(tmp_path: Path) -> None:
    assert read_timelines(tmp_path) == ({}, [])


def test_damaged_rows_are_named_and_damaged_spans_left_out(tmp_path: Path) -> None:
    rows = [
        {"step": 0, "seconds": 1.0, "phases": {"train": [[0.0, 0.5], [0.9, 0.1], ["a"], 7, [1]]}},
        {"step": "1", "seconds": 1.0},
        {"step": 2, "seconds": None},
        {"step": 3, "seconds": 1.0, "phases": [], "beside": {"x": 5}},
    ]
    text = "".join(json.dumps(row) + "\n" for row in rows) + "{torn"
    (tmp_path / FILE_NAME).write_text(text)
    found, remarks = read_timelines(tmp_path)
    assert found == {
        0: Timeline(seconds=1.0, phases={"train": ((0.0, 0.5),)}),
        3: Timeline(seconds=1.0),
    }
    assert len(remarks) == 3


def test_lanes_stand_in_the_order_of_their_begin_with_those_beside_below() -> None:
    timeline = Timeline(
        seconds=4.0,
        phases={"train": ((2.0, 4.0),), "rollout": ((0.0, 2.0),)},
        beside={"reward": ((1.0, 2.0),)},
    )
    lanes = draw_lanes({7: timeline}, ["rollout", "train"])
    assert lanes is not None
    assert [(lane.name, lane.beside) for lane in lanes.lanes] == [
        ("rollout", False),
        ("train", False),
        ("reward", True),
    ]
    assert [lane.kind for lane in lanes.lanes] == [0, 1, 2]
    middle = (LEFT + RIGHT) / 2
    assert lanes.lanes[0].blocks == (Block(x=LEFT, width=middle - LEFT),)
    assert lanes.lanes[1].blocks == (Block(x=middle, width=RIGHT - middle),)
    assert lanes.lanes[2].blocks == (
        Block(x=(LEFT + middle) / 2, width=pytest.approx((RIGHT - LEFT) / 4, abs=0.1)),
    )
    assert [(border.place, border.label) for border in lanes.borders] == [(LEFT, "8")]
    assert next(tick.label for tick in lanes.x_ticks) == "0.0"


def test_only_the_last_three_iterations_are_drawn_one_behind_the_other() -> None:
    timelines = {step: Timeline(seconds=1.0, phases={"train": ((0.0, 1.0),)}) for step in range(10)}
    lanes = draw_lanes(timelines)
    assert lanes is not None
    assert [border.label for border in lanes.borders] == ["8", "9", "10"]
    third = (RIGHT - LEFT) / 3
    places = [border.place for border in lanes.borders]
    assert places == pytest.approx([LEFT, LEFT + third, LEFT + 2 * third], abs=0.1)
    assert len(lanes.lanes) == 1
    assert len(lanes.lanes[0].blocks) == 1  # they touch


def test_a_short_stretch_is_still_seen_and_nothing_leaves_the_box() -> None:
    timeline = Timeline(
        seconds=1000.0, phases={"sync": ((500.0, 500.001),), "train": ((-5.0, 2000.0),)}
    )
    lanes = draw_lanes({0: timeline})
    assert lanes is not None
    by_name = {lane.name: lane.blocks for lane in lanes.lanes}
    assert by_name["sync"][0].width == 0.5
    assert by_name["train"] == (Block(x=LEFT, width=RIGHT - LEFT),)


def test_nothing_is_drawn_of_nothing() -> None:
    assert draw_lanes({}) is None
    assert draw_lanes({0: Timeline(seconds=0.0)}) is None

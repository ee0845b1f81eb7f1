from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from drl.observe.chart import (
    BOTTOM,
    LEFT,
    MOST_BARS,
    RIGHT,
    TOP,
    Series,
    bar_chart,
    label,
    line_chart,
    thin,
    ticks,
)

figures = st.floats(-1e150, 1e150, allow_nan=False)


def coordinates(text: str) -> list[tuple[float, float]]:
    return [(float(x), float(y)) for x, y in (point.split(",") for point in text.split())]


@pytest.mark.parametrize(
    ("low", "high", "expected"),
    [
        (0.0, 10.0, [0, 2, 4, 6, 8, 10]),
        (0.13, 0.61, [0.2, 0.3, 0.4, 0.5, 0.6]),
        (-3.0, 3.0, [-2, 0, 2]),
        (5.0, 5.0, [5.0]),
        (0.0, 3800.0, [0, 1000, 2000, 3000]),
    ],
)
def test_ticks_are_round_numbers_inside_the_range(
    low: float, high: float, expected: list[float]
) -> None:
    assert ticks(low, high) == pytest.approx(expected)


@given(figures, figures)
def test_ticks_are_few_for_any_range(one: float, two: float) -> None:
    assert 1 <= len(ticks(min(one, two), max(one, two))) <= 12


@pytest.mark.parametrize("high", [5e-324, 1e-310, 9e-301])
def test_a_span_too_small_for_any_power_of_ten_is_drawn_as_a_constant(high: float) -> None:
    assert ticks(0.0, high) == [0.0]
    chart = line_chart([Series(name="lr", points=[(0, 0.0), (1, high)])], "iteration")
    assert len(chart.y_ticks) == 1


@pytest.mark.parametrize(
    ("value", "step", "text"),
    [
        (0.25, 0.05, "0.25"),
        (0.6000000000000001, 0.2, "0.6"),
        (1.0002, 0.0002, "1.0002"),
        (2000.0, 1000.0, "2000"),
        (0.0, 0.2, "0.0"),
        (3e-6, 1e-6, "3e-6"),
        (1.5e7, 5e6, "1.5e7"),
        (0.764052, 0.0, "0.764052"),
        (0.0, 0.0, "0"),
    ],
)
def test_labels_have_the_digits_that_tell_neighbours_apart(
    value: float, step: float, text: str
) -> None:
    assert label(value, step) == text


def test_a_line_runs_from_corner_to_corner_with_a_little_air() -> None:
    chart = line_chart([Series(name="reward", points=[(0, 1.0), (10, 2.0)])], "iteration")
    height = BOTTOM - TOP
    (first, last) = coordinates(chart.lines[0].line)
    air = 0.04 / 1.08 * height
    assert (first[0], last[0]) == (LEFT, RIGHT)
    assert first[1] == pytest.approx(BOTTOM - air, abs=0.06)
    assert last[1] == pytest.approx(TOP + air, abs=0.06)
    assert chart.x_label == "iteration"


def test_what_is_never_negative_has_no_negative_axis() -> None:
    chart = line_chart([Series(name="share", points=[(0, 0.0), (1, 1.0)])], "iteration")
    assert coordinates(chart.lines[0].line)[0][1] == BOTTOM
    assert chart.y_ticks[0].label == "0.0"


def test_the_band_goes_out_above_and_comes_back_below() -> None:
    one = Series(name="r", points=[(0, 1.0), (1, 1.0)], spread={0: 1.0, 1: 0.5})
    chart = line_chart([one], "iteration")
    upper_left, upper_right, lower_right, lower_left = coordinates(chart.lines[0].band)
    assert upper_left[0] == lower_left[0] == LEFT
    assert upper_right[0] == lower_right[0] == RIGHT
    middle = coordinates(chart.lines[0].line)[0][1]
    assert lower_left[1] - middle == pytest.approx(middle - upper_left[1], abs=0.11)
    assert lower_right[1] - middle == pytest.approx((lower_left[1] - middle) / 2, abs=0.11)


def test_one_value_alone_is_a_dot_in_the_middle() -> None:
    chart = line_chart([Series(name="eval", points=[(3, 0.5)])], "iteration")
    assert chart.lines[0].dots == (((LEFT + RIGHT) / 2, (TOP + BOTTOM) / 2),)


@given(
    st.lists(
        st.tuples(st.integers(-5, 10**12), figures, st.floats(0, 1e150)), min_size=1, max_size=30
    )
)
def test_everything_stays_in_the_box(rows: list[tuple[int, float, float]]) -> None:
    unique = {x: (y, half) for x, y, half in rows}
    one = Series(
        name="any",
        points=[(float(x), unique[x][0]) for x in sorted(unique)],
        spread={float(x): half for x, (_, half) in unique.items()},
        dots=True,
    )
    chart = line_chart([one], "iteration")
    drawn = [
        *coordinates(chart.lines[0].line),
        *coordinates(chart.lines[0].band),
        *chart.lines[0].dots,
    ]
    assert all(LEFT <= x <= RIGHT and TOP <= y <= BOTTOM for x, y in drawn)
    assert all(TOP <= tick.place <= BOTTOM for tick in chart.y_ticks)
    assert all(LEFT <= tick.place <= RIGHT for tick in chart.x_ticks)


def test_thinning_keeps_ends_and_spikes() -> None:
    points = [(float(x), 0.0) for x in range(10_000)]
    points[4321] = (4321.0, 9.0)
    points[7777] = (7777.0, -9.0)
    kept = thin(points)
    assert len(kept) <= 242
    assert kept[0] == points[0]
    assert kept[-1] == points[-1]
    assert points[4321] in kept
    assert points[7777] in kept
    assert kept == sorted(kept)


def test_few_points_are_not_thinned() -> None:
    points = [(float(x), 1.0) for x in range(240)]
    assert thin(points) == points


def test_bars_are_stacked_from_the_ground() -> None:
    chart = bar_chart([(0, [1.0, 3.0]), (1, [2.0, 0.0])], "iteration")
    first, second, third = chart.bars
    height = BOTTOM - TOP
    assert first.y + first.height == BOTTOM
    assert first.height == pytest.approx(height / 4, abs=0.1)
    assert second.y == TOP
    assert second.y + second.height == pytest.approx(first.y, abs=0.1)
    assert (second.kind, third.kind) == (1, 0)
    assert third.height == pytest.approx(height / 2, abs=0.1)


def test_many_bars_are_joined_by_their_mean() -> None:
    chart = bar_chart([(float(x), [2.0 * (x % 2)]) for x in range(600)], "iteration")
    assert len(chart.bars) == MOST_BARS
    assert {bar.height for bar in chart.bars} == {BOTTOM - TOP}


@pytest.mark.parametrize(
    ("value", "text"),
    [(999_999.0, "999999"), (1e6, "1e6"), (1e-4, "0.0001"), (9.99e-5, "9.99e-5"), (-2e6, "-2e6")],
)
def test_labels_turn_to_powers_of_ten_at_a_million_and_a_ten_thousandth(
    value: float, text: str
) -> None:
    assert label(value) == text


def test_thinning_keeps_the_first_point_once_whether_it_is_extreme_or_not() -> None:
    plain = [(float(x), float(x % 7)) for x in range(1000)]
    middling = [(0.0, 3.5), *plain[1:]]
    for points in (plain, middling):
        kept = thin(points)
        assert kept[0] == points[0]
        assert kept[1] != points[0]
        assert kept == sorted(kept)


@pytest.mark.parametrize(
    ("constant", "low", "high"), [(4.0, "2", "6"), (-4.0, "-6", "-2"), (0.0, "-1.0", "1.0")]
)
def test_a_constant_lies_in_the_middle_of_its_own_size(
    constant: float, low: str, high: str
) -> None:
    chart = line_chart([Series(name="c", points=[(0, constant), (9, constant)])], "iteration")
    assert {y for _, y in coordinates(chart.lines[0].line)} == {(TOP + BOTTOM) / 2}
    assert (chart.y_ticks[0].label, chart.y_ticks[-1].label) == (low, high)
    assert (chart.y_ticks[0].place, chart.y_ticks[-1].place) == (BOTTOM, TOP)


def test_the_ticks_of_an_axis_share_their_digits() -> None:
    chart = line_chart([Series(name="r", points=[(0, 0.5), (1, 1.5)])], "iteration")
    assert [tick.label for tick in chart.y_ticks] == ["0.5", "1.0", "1.5"]


def test_what_is_counted_has_whole_ticks_and_what_is_measured_has_not() -> None:
    lines = line_chart([Series(name="r", points=[(1, 0.0), (2, 1.0), (3, 1.5)])], "iteration")
    bars = bar_chart([(1.0, [1.0]), (2.0, [0.5]), (3.0, [0.5])], "iteration")
    for chart in (lines, bars):
        assert [tick.label for tick in chart.x_ticks] == ["1", "2", "3"]
        assert any("." in tick.label for tick in chart.y_ticks)


def test_the_ticks_of_bars_stand_under_their_middles_and_start_at_the_ground() -> None:
    chart = bar_chart([(float(x), [1.0]) for x in range(5)], "iteration")
    middles = [bar.x + bar.width / 2 for bar in chart.bars]
    assert [tick.place for tick in chart.x_ticks] == pytest.approx(middles, abs=0.11)
    assert [tick.label for tick in chart.x_ticks] == ["0", "1", "2", "3", "4"]
    slot = (RIGHT - LEFT) / 5
    assert [bar.width for bar in chart.bars] == pytest.approx([0.8 * slot] * 5)
    assert [bar.x - LEFT for bar in chart.bars] == pytest.approx(
        [slot * (number + 0.1) for number in range(5)]
    )
    assert (chart.y_ticks[0].label, chart.y_ticks[0].place) == ("0.0", BOTTOM)
    assert chart.y_ticks[-1].place == TOP


def test_phases_without_time_have_no_bar_and_still_an_axis() -> None:
    chart = bar_chart([(0.0, [0.0, 0.0]), (1.0, [0.0, 0.0])], "iteration")
    assert chart.bars == ()
    assert [tick.label for tick in chart.y_ticks] == ["0.0", "0.2", "0.4", "0.6", "0.8", "1.0"]


def test_joined_bars_stand_for_the_mean_of_their_neighbours() -> None:
    rising = [(float(x), [float(x), 1.0]) for x in range(2 * MOST_BARS)]
    chart = bar_chart(rising, "iteration")
    highest = 2 * MOST_BARS - 1.5 + 1.0  # the mean of the last two, and the piece above it
    assert [tick.label for tick in chart.y_ticks] == ["0", "50", "100"]
    first = [bar for bar in chart.bars if bar.kind == 0]
    scale = (BOTTOM - TOP) / highest
    for place in (10, 30, 59):
        assert first[place].height == pytest.approx((2 * place + 0.5) * scale, abs=0.11)


def test_a_line_has_dots_where_asked_or_where_a_line_would_be_invisible() -> None:
    points = [(0.0, 1.0), (1.0, 2.0)]
    plain, dotted, alone = (
        Series(name="p", points=points),
        Series(name="d", points=points, dots=True),
        Series(name="a", points=points[:1]),
    )
    lines = line_chart([plain, dotted, alone], "iteration").lines
    assert [len(line.dots) for line in lines] == [0, 2, 1]
    assert [line.name for line in lines] == ["p", "d", "a"]

"""Rates of cards: the line through observations, the user's file, and what ships."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from drl.errors import DataError
from drl.plan.rates import (
    ACTIVATIONS,
    DECODE,
    DRIVER,
    FORWARD,
    KINDS,
    SAMPLE,
    SYNC,
    TRAINING,
    Line,
    Observation,
    RateKey,
    find_rates,
    fit,
    rates_path,
    read_table,
    record_rates,
    release,
    scaled,
    shipped_table,
)

KEY = RateKey(device="Card", torch="2.11.0", dtype="bf16", compiled=True)
H200 = RateKey(device="NVIDIA H200", torch="2.11.0", dtype="bf16", compiled=True)


@pytest.fixture(autouse=True)
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The user's file, which is not there yet."""
    path = tmp_path / "cache" / "rates.json"
    monkeypatch.setenv("DRL_RATES", str(path))
    return path


def seen(kind: str, work: float, value: float, calls: float = 1.0) -> Observation:
    return Observation(kind=kind, work=work, value=value, calls=calls)


@given(
    st.floats(0, 10),
    st.floats(0.01, 10),
    st.lists(st.integers(1, 50), min_size=2, max_size=6, unique=True),
)
def test_a_line_is_found_again(fixed: float, slope: float, works: list[int]) -> None:
    line = fit([seen(FORWARD, work, fixed + slope * work) for work in works])
    for work in (0.5, 7, 200):
        expected = fixed + slope * work
        assert line(work=work) == pytest.approx(expected, rel=1e-3, abs=1e-3 * (fixed + slope))


def test_a_line_by_hand() -> None:
    # 2 s a call and 3 s a unit: 5 s for one unit, 11 s for three; two calls of one unit each are 10 s
    line = fit([seen(FORWARD, 1, 5), seen(FORWARD, 3, 11)])
    assert (line.fixed, line.slope) == pytest.approx((2, 3))
    assert line(work=2, calls=2) == pytest.approx(10)


def test_one_size_gives_a_rate_without_a_fixed_part() -> None:
    line = fit([seen(TRAINING, 4, 8), seen(TRAINING, 4, 8.4), seen(TRAINING, 4, 20)])
    assert line.fixed == 0
    assert line.slope == pytest.approx(2.1)  # the median, whatever the outlier


def test_values_without_calls_are_shares_whatever_their_sizes() -> None:
    line = fit([seen(ACTIVATIONS, 10, 6, calls=0), seen(ACTIVATIONS, 30, 19.5, calls=0)])
    assert line.fixed == 0
    assert line(work=100, calls=0) == pytest.approx(62.5)  # the median of 0.6 and 0.65


def test_sizes_that_hardly_differ_do_not_make_a_line() -> None:
    line = fit([seen(FORWARD, 99.9999, 4), seen(FORWARD, 100.0001, 8)])
    assert (line.fixed, line.slope) == (0, pytest.approx(0.06, rel=1e-4))


def test_work_that_grows_faster_than_linear_gives_no_negative_fixed_part() -> None:
    line = fit([seen(FORWARD, 1, 1), seen(FORWARD, 2, 4)])
    assert line.fixed == 0
    assert line.slope > 0


def test_time_that_falls_with_work_is_all_fixed() -> None:
    line = fit([seen(FORWARD, 1, 4), seen(FORWARD, 2, 3)])
    assert line.slope == 0
    assert 3 <= line.fixed <= 4


def test_calls_without_work_have_a_median() -> None:
    line = fit([seen(SYNC, 0, 1.0), seen(SYNC, 0, 3.0), seen(SYNC, 0, 2.0)])
    assert line(work=0) == 2.0


def test_what_is_recorded_is_found(own: Path) -> None:
    assert find_rates(KEY) is None
    assert record_rates(KEY, [seen(FORWARD, 2, 4)]) == own == rates_path()
    rates = find_rates(KEY)
    assert rates is not None
    assert rates.value(FORWARD, work=3, calls=1) == pytest.approx(6)
    assert rates.value(SAMPLE, work=3) is None


def test_a_new_measurement_of_the_same_size_takes_the_place_of_the_old(own: Path) -> None:
    record_rates(KEY, [seen(FORWARD, 100, 4), seen(FORWARD, 200, 8)])
    record_rates(KEY, [seen(FORWARD, 100.4, 2)])
    kept = read_table(own).rows[KEY]
    assert sorted(one.value for one in kept) == [2, 8]


@pytest.mark.parametrize(
    "other",
    [
        RateKey(device="Other", torch="2.11.0", dtype="bf16", compiled=True),
        RateKey(device="Card", torch="2.11.0", dtype="fp32", compiled=True),
        RateKey(device="Card", torch="2.11.0", dtype="bf16", compiled=False),
    ],
)
def test_rates_hold_for_one_card_dtype_and_mode(other: RateKey) -> None:
    record_rates(KEY, [seen(FORWARD, 1, 1)])
    assert find_rates(other) is None


def test_another_torch_stands_in_and_is_named() -> None:
    old = RateKey(device="Card", torch="2.9.1", dtype="bf16", compiled=True)
    new = RateKey(device="Card", torch="2.13.0", dtype="bf16", compiled=True)
    record_rates(old, [seen(FORWARD, 1, 9)])
    record_rates(KEY, [seen(FORWARD, 1, 1)])
    rates = find_rates(new)
    assert rates is not None
    assert (rates.torch, rates.value(FORWARD, work=1)) == ("2.11.0", 1)
    exact = find_rates(old)
    assert exact is not None
    assert (exact.torch, exact.value(FORWARD, work=1)) == ("2.9.1", 9)


def test_own_observations_of_two_sizes_silence_the_shipped_ones() -> None:
    shipped = find_rates(H200)
    assert shipped is not None
    record_rates(H200, [seen(FORWARD, 1e12, 1.0), seen(FORWARD, 3e12, 3.0)])
    mine = find_rates(H200)
    assert mine is not None
    assert mine.value(FORWARD, work=2e12) == pytest.approx(2.0)
    for kind in (TRAINING, f"{DECODE}fp32"):
        assert mine.value(kind, work=1e12) == shipped.value(kind, work=1e12)


def test_own_observations_of_one_size_scale_the_shipped_line() -> None:
    shipped = find_rates(H200)
    assert shipped is not None
    usual = [shipped.value(FORWARD, work=work) for work in (1e12, 8e12)]
    assert usual[0] is not None
    record_rates(H200, [seen(FORWARD, 1e12, 3 * usual[0])])
    mine = find_rates(H200)
    assert mine is not None
    found = [mine.value(FORWARD, work=work) for work in (1e12, 8e12)]
    assert found == pytest.approx([3 * one for one in usual if one])


def test_an_observation_of_nothing_scales_nothing() -> None:
    line = Line(fixed=1.0, slope=2.0)
    assert scaled(line, []) == scaled(line, [seen(SAMPLE, 0.0, 1.0, calls=0.0)]) == line


def test_what_ships_is_complete_and_of_known_kinds() -> None:
    table = shipped_table()
    assert {key.device for key in table.rows} == {"NVIDIA H200"}
    for key, observations in table.rows.items():
        assert key.dtype == "bf16"
        assert {FORWARD, TRAINING} <= {one.kind for one in observations}
        assert {one.kind for one in observations} <= KINDS.keys()
        assert all(one.value > 0 and one.source for one in observations)


def test_a_kind_that_nobody_knows_is_not_written(own: Path) -> None:
    with pytest.raises(DataError, match="'speed'"):
        record_rates(KEY, [seen("speed", 1, 1)])
    assert not own.exists()


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        "{}",
        '{"format": 2, "cards": []}',
        '{"format": 1, "cards": {}}',
        '{"format": 1, "cards": [{"device": "x"}]}',
    ],
)
def test_a_file_of_something_else_is_named(own: Path, text: str) -> None:
    own.parent.mkdir()
    own.write_text(text)
    with pytest.raises(DataError, match=r"rates\.json is no file of measured rates"):
        find_rates(KEY)
    with pytest.raises(DataError):
        record_rates(KEY, [seen(FORWARD, 1, 1)])
    assert own.read_text() == text


def test_kinds_to_forget_go_whatever_their_work(own: Path) -> None:
    record_rates(KEY, [seen(FORWARD, 1, 1), seen(SAMPLE, 1, 1), seen(SAMPLE, 9, 1)])
    record_rates(KEY, [seen(SAMPLE, 5, 2)], forget=(SAMPLE,))
    assert read_table(own).rows[KEY] == (seen(FORWARD, 1, 1), seen(SAMPLE, 5, 2))


def test_a_kind_that_another_torch_alone_has_seen_stands_in() -> None:
    old = RateKey(device="Card", torch="2.9.1", dtype="bf16", compiled=True)
    record_rates(old, [seen(FORWARD, 1, 9), seen(TRAINING, 1, 9)])
    record_rates(KEY, [seen(TRAINING, 1, 1)])
    rates = find_rates(KEY)
    assert rates is not None
    assert rates.torch == "2.11.0"
    assert [rates.value(kind, work=1) for kind in (FORWARD, TRAINING)] == [9, 1]


DAMAGES: list[tuple[str, Any]] = [
    ("value", "y"),
    ("value", None),
    ("value", 0),
    ("value", -1.0),
    ("value", float("nan")),
    ("value", float("inf")),
    ("value", True),
    ("work", "1"),
    ("work", -1.0),
    ("calls", 0),
    ("calls", None),
    ("kind", "speed"),
    ("kind", None),
    ("more", 1),
]


@pytest.mark.parametrize(("name", "value"), DAMAGES)
def test_a_damaged_observation_is_refused_where_the_file_is_read(
    own: Path, name: str, value: Any
) -> None:
    record_rates(KEY, [seen(FORWARD, 1, 1)])
    content = json.loads(own.read_text())
    content["cards"][0]["observations"][0][name] = value
    own.write_text(json.dumps(content))
    with pytest.raises(
        DataError, match=r"rates\.json is no file of measured rates(.|\n)*remove it"
    ):
        find_rates(KEY)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("device", None),
        ("torch", 2.11),
        ("dtype", []),
        ("compiled", "no"),
        ("observations", {}),
        ("observations", "x"),
    ],
)
def test_a_damaged_card_is_refused_too(own: Path, name: str, value: Any) -> None:
    record_rates(KEY, [seen(FORWARD, 1, 1)])
    content = json.loads(own.read_text())
    content["cards"][0][name] = value
    own.write_text(json.dumps(content))
    with pytest.raises(DataError, match="is no file of measured rates"):
        find_rates(KEY)


def test_what_may_be_nothing_is_taken_a_driver_without_time_and_shares_without_calls() -> None:
    record_rates(KEY, [seen(DRIVER, 0, 0.0), seen(ACTIVATIONS, 4, 2, calls=0)])
    rates = find_rates(KEY)
    assert rates is not None
    assert rates.value(DRIVER, work=0) == 0
    assert rates.value(ACTIVATIONS, work=8, calls=0) == 4
    with pytest.raises(DataError, match="nothing was done"):
        record_rates(KEY, [seen(ACTIVATIONS, 0, 2)])


def test_the_file_is_in_the_cache_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("DRL_RATES")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert rates_path() == tmp_path / "drl" / "rates.json"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    assert rates_path() == tmp_path / "home" / ".cache" / "drl" / "rates.json"


def test_the_file_can_be_read_by_a_person(own: Path) -> None:
    record_rates(KEY, [Observation(kind=FORWARD, work=1, value=2, source="drl bench x")])
    (card,) = json.loads(own.read_text())["cards"]
    assert (card["device"], card["compiled"]) == ("Card", True)
    assert card["observations"][0]["source"] == "drl bench x"
    assert release("2.11.0+cu130") == release("2.11.0") == "2.11.0"

"""Speed and memory as people read them."""

from __future__ import annotations

from drl.observe.metrics import Metrics
from drl.observe.performance import (
    medians,
    memory_panel,
    plain_number,
    settled,
    speed,
    speed_words,
)

FIGURES = {
    "perf/images_per_second": 8.0,
    "perf/pairs_per_second": 70.0,
    "perf/train_tflops": 344.4,
    "perf/train_mfu": 0.348,
    "perf/driver_share": 0.0123,
    "perf/recompilations": 0.0,
}


def test_medians_leave_the_first_iteration_out_and_evaluations_before_training() -> None:
    rows = {
        -1: {"perf/images_per_second": 1e9},
        0: {"perf/images_per_second": 0.1},
        1: {"perf/images_per_second": 7.0},
        2: {"perf/images_per_second": 9.0},
        3: {"perf/images_per_second": 8.5},
    }
    (figure,) = speed(Metrics(rows=rows))
    assert (figure.title, figure.median, figure.last) == ("images/s", "8.5", "8.5")


def test_the_only_iteration_is_shown_although_it_warms_up() -> None:
    assert settled([{"a": 1.0}]) == [{"a": 1.0}]
    assert settled([{"a": 1.0}, {"a": 2.0}]) == [{"a": 2.0}]
    assert settled([]) == []


def test_a_figure_that_some_rows_lack_has_the_median_of_the_others() -> None:
    assert medians([{"a": 1.0, "b": 5.0}, {"a": 3.0}]) == {"a": 2.0, "b": 5.0}


def test_each_figure_is_written_in_its_own_unit_and_unknown_ones_are_absent() -> None:
    shown = {figure.title: figure.last for figure in speed(Metrics(rows={0: FIGURES}))}
    assert shown == {
        "images/s": "8",
        "pairs/s": "70",
        "TFLOP/s of training": "344",
        "MFU of training": "34.8 %",
        "driver's share of the time": "1.2 %",
        "recompilations after warm-up": "0",
    }


def test_rates_have_three_digits() -> None:
    assert [plain_number(value) for value in (0.00412, 0.5, 6.928, 41.26, 412.6, 4126.0)] == [
        "0.00412",
        "0.5",
        "6.93",
        "41.3",
        "413",
        "4126",
    ]


def test_the_console_says_rates_utilisation_and_the_largest_peak() -> None:
    peaks = {"perf/memory/train_peak_gib": 31.46, "perf/memory/rollout_peak_gib": 13.0}
    assert speed_words(FIGURES | peaks) == ["8 images/s", "70 pairs/s", "MFU 35%", "31.5 GiB"]
    assert speed_words({"perf/memory/train_gib": 0.4}) == []


def test_the_memory_chart_has_a_line_per_phase_in_the_order_of_the_other_charts() -> None:
    rows = {
        step: {
            "perf/memory/train_peak_gib": 30.0 + step,
            "perf/memory/rollout_peak_gib": 12.0,
            "perf/memory/train_gib": 6.0,
            "perf/memory/reserved_gib": 40.0,
        }
        for step in range(3)
    }
    panel = memory_panel(Metrics(rows=rows), ["rollout", "update_weights", "train"])
    assert panel is not None
    assert panel.legend == ("rollout", "train")
    assert panel.last == "32"
    assert "most that was allocated" in panel.unit
    (chart,) = panel.charts
    assert [line.name for line in chart.lines] == ["rollout", "train"]
    assert [len(line.line.split()) for line in chart.lines] == [3, 3]


def test_without_peaks_the_chart_shows_what_was_held() -> None:
    panel = memory_panel(Metrics(rows={0: {"perf/memory/train_gib": 0.4375}}), [])
    assert panel is not None
    assert panel.last == "0.44"
    assert panel.note == "resident set of the process"
    assert memory_panel(Metrics(rows={0: {"perf/train_time": 1.0}}), []) is None


def test_a_phase_that_some_iterations_lack_has_a_shorter_line() -> None:
    rows = {
        0: {"perf/memory/train_gib": 1.0, "perf/memory/eval_gib": 2.0},
        1: {"perf/memory/train_gib": 1.0},
    }
    panel = memory_panel(Metrics(rows=rows), ["train", "eval"])
    assert panel is not None
    assert [len(line.line.split()) for line in panel.charts[0].lines] == [2, 1]
    assert [tick.label for tick in panel.charts[0].x_ticks] == ["1", "2"]
    assert panel.last == "1"

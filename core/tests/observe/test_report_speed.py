"""Speed, memory and lanes in the report."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from drl.observe.directory import RunDirectory
from drl.observe.files import append_json_line
from drl.observe.lanes import FILE_NAME, record_timeline
from drl.observe.timing import Timeline

PageOf = Callable[[RunDirectory], Any]
Row = Callable[..., dict[str, Any]]

SPEED = {
    "perf/images_per_second": 8.25,
    "perf/pairs_per_second": 70.4,
    "perf/train_mfu": 0.348,
    "perf/memory/rollout_peak_gib": 12.5,
    "perf/memory/train_peak_gib": 31.25,
    "perf/memory/unaccounted_peak_gib": 6.0,
    "perf/memory/eval_peak_gib": 12.0,
}
TIMELINE = Timeline(
    seconds=3.0,
    phases={"rollout": ((0.0, 2.0),), "train": ((2.0, 3.0),)},
    beside={"reward": ((0.5, 1.0), (1.5, 2.0))},
)


def test_a_run_without_such_figures_has_a_report_without_them(
    run: RunDirectory, page_of: PageOf
) -> None:
    text = page_of(run).text
    for word in ("Memory by phase", "phase by phase", "images/s"):
        assert word not in text


def test_figures_of_speed_are_a_table_and_memory_is_a_chart(
    run: RunDirectory, page_of: PageOf, row_of: Row
) -> None:
    append_json_line(run.metrics, row_of(5, **SPEED))
    append_json_line(run.metrics, row_of(6, **(SPEED | {"perf/images_per_second": 8.75})))
    page = page_of(run)
    assert "images/s 8.5 8.75" in page.text
    assert "MFU of training 34.8 % 34.8 %" in page.text
    assert "Medians leave the first iteration out" in page.text
    assert "Memory by phase last 31.25 GiB, most that was allocated in the phase" in page.text
    labels = [svg["aria-label"] or "" for svg in page.named("svg")]
    assert "GiB, most that was allocated in the phase over iteration" in labels


def test_a_phase_has_the_same_colour_in_every_chart(
    run: RunDirectory, page_of: PageOf, row_of: Row
) -> None:
    append_json_line(run.metrics, row_of(5, **SPEED))
    record_timeline(run.path, 5, TIMELINE)
    page = page_of(run)
    names = page.text.partition("Phases of an iteration")[2].split()
    places = [names.index(name) for name in ("rollout", "train", "eval", "unaccounted")]
    assert places == sorted(places)
    lines = [line["stroke"] for line in page.named("polyline")][-4:]
    assert lines == ["var(--k0)", "var(--k1)", "var(--k2)", "var(--k3)"]
    names = page.text.partition("Memory by phase")[2].split()
    places = [names.index(name) for name in ("rollout", "train", "eval", "unaccounted")]
    assert places == sorted(places)
    lanes = [rect for rect in page.named("rect") if rect.get("height") == "14"]
    assert [rect["fill"] for rect in lanes[:2]] == ["var(--k0)", "var(--k1)"]


def test_lanes_show_the_last_iterations_and_the_work_beside_them(
    run: RunDirectory, page_of: PageOf
) -> None:
    for step in range(4):
        record_timeline(run.path, step, TIMELINE)
    page = page_of(run)
    text = page.text.partition("The last iterations, phase by phase")[2]
    shown = [f"iteration {number}" in text for number in range(1, 5)]
    assert shown == [False, True, True, True]
    assert "reward (beside)" in text
    lanes = [rect for rect in page.named("rect") if rect.get("height") == "14"]
    assert len(lanes) == 3 + 3 + 6
    assert sum("opacity" in rect for rect in lanes) == 6
    assert "phases over seconds" in [svg["aria-label"] for svg in page.named("svg")]


def test_a_damaged_timeline_is_named_and_the_report_is_written(
    run: RunDirectory, page_of: PageOf
) -> None:
    record_timeline(run.path, 0, TIMELINE)
    with (run.path / FILE_NAME).open("a") as file:
        file.write('{"step": 1, "seco')
    text = page_of(run).text
    assert "timeline.jsonl line 2 is not a whole JSON object" in text
    assert "rollout" in text

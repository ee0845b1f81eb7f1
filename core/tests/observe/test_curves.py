"""Which figures become charts: order, axes, bands, lines per update, and the time of phases."""

from __future__ import annotations

import pytest

from drl.observe.chart import BOTTOM, TOP, Series, line_chart
from drl.observe.curves import MOST_KINDS, evaluation_names, panels, phase_times
from drl.observe.metrics import Metrics

REWARD = "rollout/reward/raw_mean"
SPREAD = "rollout/reward/raw_std"
SEEN = "rollout/images_seen"


def metrics(*rows: dict[str, float], first: int = 0) -> Metrics:
    return Metrics(rows={first + place: row for place, row in enumerate(rows)})


def test_without_figures_there_is_nothing_to_draw() -> None:
    assert panels(Metrics(), {}) == []
    assert phase_times(Metrics()) == ([], None)
    assert phase_times(metrics({REWARD: 0.5})) == ([], None)


def test_a_figure_nobody_knows_has_no_chart() -> None:
    found = panels(metrics({"train/of_my_own": 1.0, "evaluation/x": 1.0, "eval/a/b/c": 1.0}), {})
    assert found == []


def test_images_seen_are_an_axis_only_where_some_were_counted() -> None:
    (plain,) = panels(metrics({"train/loss": 1.0}, {"train/loss": 2.0}), {})
    assert [chart.x_label for chart in plain.charts] == ["iteration"]
    counted = metrics({"train/loss": 1.0, SEEN: 64.0}, {"train/loss": 2.0, SEEN: 128.0})
    (both,) = panels(counted, {})
    assert [chart.x_label for chart in both.charts] == ["iteration", "images seen"]
    ends = (both.charts[1].x_ticks[0], both.charts[1].x_ticks[-1])
    assert [tick.label for tick in ends] == ["80", "120"]


def test_the_band_is_as_wide_as_the_spread_that_was_logged() -> None:
    rows = metrics({REWARD: 1.0, SPREAD: 1.0}, {REWARD: 1.0}, {REWARD: 1.0, SPREAD: 0.5})
    (panel,) = panels(rows, {})
    expected = line_chart(
        [
            Series(
                name="Training reward",
                points=[(1.0, 1.0), (2.0, 1.0), (3.0, 1.0)],
                spread={1.0: 1.0, 3.0: 0.5},
            )
        ],
        "iteration",
    )
    assert panel.charts[0] == expected
    drawn = panel.charts[0].lines[0]
    band = drawn.band.split(" ")
    assert band[1] == band[4] == drawn.line.split(" ")[1]  # no spread there: it closes on the line


def test_iterations_count_from_one_and_scores_before_training_are_at_zero() -> None:
    """``step`` of a row counts from 0, and is -1 before training."""
    row = {"eval/dev": 0.5, "perf/rollout_time": 1.0, "perf/step_time": 1.0}
    rows = {-1: {"eval/dev": 0.4}, 0: row, 1: row, 2: row}
    (panel,) = panels(Metrics(rows=rows), {})
    assert [tick.label for tick in panel.charts[0].x_ticks] == ["0", "1", "2", "3"]
    _, phases = phase_times(Metrics(rows=rows))
    assert phases is not None
    assert [tick.label for tick in phases.x_ticks] == ["1", "2", "3"]


def test_evaluations_are_few_and_get_dots_training_curves_do_not() -> None:
    rows = metrics(
        {REWARD: 0.1, "eval/words": 0.2}, {REWARD: 0.3}, {REWARD: 0.2, "eval/words": 0.4}
    )
    reward, held_out = panels(rows, {"eval/words": "euler ODE"})
    assert [len(panel.charts[0].lines[0].dots) for panel in (reward, held_out)] == [0, 2]
    assert (held_out.title, held_out.note, held_out.last) == (
        "Held-out reward: words",
        "euler ODE",
        "0.4",
    )
    assert (reward.note, reward.last) == ("", "0.2")


def test_sets_and_samplers_are_told_from_the_step_of_an_evaluation() -> None:
    row = dict.fromkeys(
        ["eval/b", "eval/a/rollout_sampler", "eval/step", "eval/a", "eval/a/other"], 1.0
    )
    assert evaluation_names(metrics(row)) == ["eval/b", "eval/a/rollout_sampler", "eval/a"]


@pytest.mark.parametrize(
    ("updates", "legend"),
    [(0, ()), (1, ()), (2, ("update 0", "update 1")), (11, MOST_KINDS)],
)
def test_several_inner_updates_replace_the_line_of_their_figure(
    updates: int, legend: tuple[str, ...] | int
) -> None:
    row = {"train/loss": 9.0} | {f"train/loss_update_{k}": float(k) for k in range(updates)}
    (panel,) = panels(metrics(row), {})
    expected = tuple(f"update {k}" for k in range(legend)) if isinstance(legend, int) else legend
    assert panel.legend == expected
    assert panel.last == ("0" if updates > 1 else "9")
    assert len(panel.charts[0].lines) == max(1, len(expected))


def test_terms_of_a_reward_are_drawn_when_there_are_several_and_at_most_four() -> None:
    own = {"rollout/reward/raw_mean": 1.0, "rollout/reward/group_mean_avg": 1.0}
    for count, shown in [(1, 0), (2, 2), (4, 4), (6, 4)]:
        terms = {f"rollout/reward/term{n}_mean": float(n) for n in range(count)}
        titles = [panel.title for panel in panels(metrics(own | terms), {})]
        assert titles == ["Training reward", *[f"Reward term term{n}" for n in range(shown)]]


def times(**seconds: float) -> dict[str, float]:
    return {f"perf/{name}_time": value for name, value in seconds.items()}


def test_phases_are_sums_over_the_run_longest_first() -> None:
    rows = metrics(times(train=1.0, rollout=2.0, step=4.0, unaccounted=1.0), times(train=4.0))
    table, chart = phase_times(rows)
    assert [(row.name, row.seconds, row.share) for row in table] == [
        ("train", 5.0, 0.625),
        ("rollout", 2.0, 0.25),
        ("unaccounted", 1.0, 0.125),
    ]
    assert chart is not None
    heights = {(bar.kind, bar.x < 200): bar.height for bar in chart.bars}
    scale = (BOTTOM - TOP) / 4.0  # both iterations took 4 seconds
    assert heights == pytest.approx(
        {
            (0, True): scale,
            (1, True): 2 * scale,
            (2, True): scale,
            (0, False): 4 * scale,
        },
        abs=0.11,
    )


def test_time_that_no_phase_claims_is_no_phase_of_its_own() -> None:
    table, _ = phase_times(metrics(times(unaccounted=3.0)))
    assert table == []
    table, _ = phase_times(metrics(times(train=1.0, unaccounted=0.0)))
    assert [row.name for row in table] == ["train"]


@pytest.mark.parametrize(("kinds", "others"), [(MOST_KINDS, 0), (MOST_KINDS + 1, 2), (20, 13)])
def test_the_shortest_phases_are_joined_when_there_are_too_many(kinds: int, others: int) -> None:
    row = times(**{f"p{n}": float(n + 1) for n in range(kinds)})
    table, chart = phase_times(metrics(row))
    assert len(table) == MOST_KINDS
    assert sum(part.share for part in table) == pytest.approx(1.0)
    joined = [part.seconds for part in table if part.name == "other"]
    assert joined == ([sum(range(1, others + 1))] if others else [])
    assert chart is not None
    assert {bar.kind for bar in chart.bars} == set(range(MOST_KINDS))


def test_other_stands_last_even_when_it_is_the_longest() -> None:
    row = times(**{f"p{n}": 1.0 for n in range(30)})
    table, _ = phase_times(metrics(row))
    assert [part.name for part in table][-1] == "other"
    assert table[-1].seconds == 30 - (MOST_KINDS - 1)

from __future__ import annotations

import time

import pytest

from drl.observe.timing import Phases, phases_of


class Hand:
    """A clock that a test moves by hand."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def test_time_goes_to_the_phase_it_was_spent_in() -> None:
    hand = Hand()
    phases = Phases(hand)
    with phases.phase("rollout"):
        hand.now += 3.0
    hand.now += 0.25
    with phases.phase("train"):
        hand.now += 1.0
    with phases.phase("rollout"):
        hand.now += 0.5
    assert phases.finish() == {
        "perf/rollout_time": 3.5,
        "perf/train_time": 1.0,
        "perf/unaccounted_time": 0.25,
        "perf/step_time": 4.75,
        "perf/train_wait_time": 3.75,
        "perf/wait_time_ratio": 3.75 / 4.75,
    }


def test_an_inner_phase_pauses_the_outer_one() -> None:
    hand = Hand()
    phases = Phases(hand)
    with phases.phase("rollout"):
        hand.now += 1.0
        with phases.phase("reward"):
            assert phases.current == "reward"
            hand.now += 2.0
        assert phases.current == "rollout"
        hand.now += 4.0
    assert phases.current is None
    figures = phases.finish()
    assert figures["perf/rollout_time"] == 5.0
    assert figures["perf/reward_time"] == 2.0
    assert figures["perf/step_time"] == 7.0


def test_no_time_is_lost_between_iterations() -> None:
    hand = Hand()
    phases = Phases(hand)
    with phases.phase("rollout"):
        hand.now += 1.0
    phases.finish()
    hand.now += 0.5
    with phases.phase("rollout"):
        hand.now += 2.0
    figures = phases.finish()
    assert figures["perf/unaccounted_time"] == 0.5
    assert figures["perf/step_time"] == 2.5
    assert phases.totals == {"rollout": 3.0, "step": 3.5}


def test_start_forgets_what_came_before_the_first_iteration() -> None:
    hand = Hand()
    phases = Phases(hand)
    hand.now += 60.0
    phases.start()
    hand.now += 1.0
    assert phases.finish()["perf/step_time"] == 1.0


def test_work_beside_a_phase_stays_out_of_the_sum() -> None:
    hand = Hand()
    phases = Phases(hand)
    with phases.phase("rollout"):
        hand.now += 2.0
    phases.overlap("reward", 1.5)
    phases.overlap("reward", 0.25)
    figures = phases.finish()
    assert figures["perf/overlapped/reward_time"] == 1.75
    assert figures["perf/step_time"] == 2.0
    assert phases_of(figures) == {"rollout": 2.0}


def test_phases_sum_to_the_step_time_within_five_percent() -> None:
    phases = Phases()
    gaps = []
    for _ in range(3):
        with phases.phase("rollout"):
            time.sleep(0.02)
            with phases.phase("reward"):
                time.sleep(0.01)
        with phases.phase("train"):
            sum(range(200_000))
        with phases.phase("update_weights"):
            time.sleep(0.005)
        figures = phases.finish()
        total = sum(phases_of(figures).values())
        gaps.append(1 - total / figures["perf/step_time"])
        assert total + figures["perf/unaccounted_time"] == pytest.approx(figures["perf/step_time"])
    assert min(gaps) < 0.05  # a busy machine may pause the test between two phases now and then


def test_an_error_inside_a_phase_is_charged_and_passed_on() -> None:
    hand = Hand()
    phases = Phases(hand)

    def fail_after_two_seconds() -> None:
        with phases.phase("rollout"):
            hand.now += 2.0
            raise KeyError

    with pytest.raises(KeyError):
        fail_after_two_seconds()
    assert phases.finish()["perf/rollout_time"] == 2.0


def test_phases_that_cross_are_refused() -> None:
    phases = Phases()
    outer, inner = phases.phase("rollout"), phases.phase("reward")
    outer.__enter__()
    inner.__enter__()
    with pytest.raises(RuntimeError, match=r"'rollout' ended while .*overlap\(\)"):
        outer.__exit__(None, None, None)


def test_an_iteration_cannot_end_inside_a_phase() -> None:
    phases = Phases()
    with phases.phase("train"), pytest.raises(RuntimeError, match=r"'train'.* still open"):
        phases.finish()


def test_phases_of_leaves_out_sums_ratios_and_other_metrics() -> None:
    row = {
        "step": 3,
        "perf/rollout_time": 1.0,
        "perf/step_time": 2.0,
        "perf/train_wait_time": 1.0,
        "perf/unaccounted_time": 0.1,
        "perf/wait_time_ratio": 0.5,
        "perf/non_generation_time/mean": 0.2,
        "train/loss": 0.0,
    }
    assert phases_of(row) == {"rollout": 1.0}


class Still:
    """A clock that stands."""

    def __call__(self) -> float:
        return 7.0


def test_an_iteration_without_duration_has_no_ratio_to_divide_by() -> None:
    phases = Phases(Still())
    with phases.phase("train"):
        pass
    figures = phases.finish()
    assert (figures["perf/train_wait_time"], figures["perf/wait_time_ratio"]) == (0.0, 0.0)


def test_the_trainer_waits_for_all_that_is_not_training() -> None:
    hand = Hand()
    phases = Phases(hand)
    with phases.phase("rollout"):
        hand.now += 6.0
    with phases.phase("train"):
        hand.now += 2.0
    figures = phases.finish()
    assert (figures["perf/train_wait_time"], figures["perf/wait_time_ratio"]) == (6.0, 0.75)
    assert "perf/train_wait_time" not in phases.finish()


def test_totals_are_of_all_iterations_and_cannot_be_changed_from_outside() -> None:
    hand = Hand()
    phases = Phases(hand)
    for seconds in (1.0, 2.0):
        with phases.phase("train"):
            hand.now += seconds
        hand.now += 0.5
        phases.finish()
    phases.totals["train"] = 0.0  # type: ignore[index]
    assert phases.totals == {"train": 3.0, "step": 4.0}
    assert phases.current is None

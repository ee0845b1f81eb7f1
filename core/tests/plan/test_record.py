"""What a run teaches: after it, the plan of the same recipe says what was measured, slower or faster."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from small_plan import prediction

from drl.plan.predict import Card, Prediction
from drl.plan.rates import (
    DRIVER,
    FORWARD,
    SAMPLE,
    TRAINING,
    Observation,
    RateKey,
    read_table,
    record_rates,
)
from drl.plan.record import Measured, record_run

SHIPPED = Card(name="NVIDIA H200", torch="2.11.0")
UNKNOWN = Card(name="Card", torch="2.11.0")


@pytest.fixture(autouse=True)
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = tmp_path / "rates.json"
    monkeypatch.setenv("DRL_RATES", str(path))
    return path


def taught(base: Prediction, rollout: float, train: float) -> dict[str, float]:
    """Return the seconds that are planned after a run that took so many."""
    record_run(
        replace(base),
        Measured(seconds={"rollout": rollout, "train": train}, iteration_s=rollout + train),
    )
    seconds = replace(base).seconds
    assert seconds is not None
    return {phase: seconds[phase] for phase in ("rollout", "train")}


ORDERS = ((8.0, 0.8, 0.8, 2.0, 0.8), (0.8, 8.0, 0.8), (0.002, 90.0, 0.004))


@pytest.mark.parametrize("card", [SHIPPED, UNKNOWN], ids=["shipped", "unknown"])
@pytest.mark.parametrize("orders", ORDERS)
@pytest.mark.parametrize("checkpointed", [0.0, 1.0])
@pytest.mark.parametrize("compiled", [False, True])
def test_the_latest_run_counts_whether_slower_or_faster(
    card: Card, orders: tuple[float, ...], checkpointed: float, compiled: bool
) -> None:
    base = replace(
        prediction(checkpointed=checkpointed, compiled=compiled, engine_compiled=compiled),
        card=card,
    )
    for seconds in orders:
        measured = {"rollout": seconds, "train": 2 * seconds}
        assert taught(base, *measured.values()) == pytest.approx(measured, rel=0.02)


def test_second_forwards_that_turn_out_cheap_are_learnt_too() -> None:
    plain, again = prediction(), prediction(checkpointed=1.0)
    for seconds in (9.0, 3.0, 12.0, 5.0):
        assert taught(plain, 1.0, 8.0)["train"] == pytest.approx(8.0)
        assert taught(again, 1.0, seconds)["train"] == pytest.approx(seconds)


def test_what_was_put_down_to_samples_goes_with_the_forwards_that_it_was_left_from(
    own: Path,
) -> None:
    base = prediction()
    for seconds in (1.0, 3.0, 0.5):
        taught(base, seconds, 1.0)
    (rows,) = read_table(own).rows.values()
    kinds = [one.kind for one in rows]
    assert (kinds.count(FORWARD), kinds.count(SAMPLE)) == (1, 0)


def test_a_first_run_with_another_torch_does_not_hide_what_an_older_one_knew(own: Path) -> None:
    old = RateKey(device="Card", torch="2.9.1", dtype="bf16", compiled=False)
    known = [Observation(kind=kind, work=1e12, value=0.01) for kind in (FORWARD, TRAINING)]
    record_rates(old, known)
    assert taught(prediction(), 3.0, 4.0) == pytest.approx({"rollout": 3.0, "train": 4.0})


def test_a_phase_that_took_no_time_tells_nothing_but_of_the_driver(own: Path) -> None:
    record_run(
        prediction(),
        Measured(seconds={"rollout": 0.0, "train": 0.0, "update_weights": 0.0}, iteration_s=0.0),
    )
    (rows,) = read_table(own).rows.values()
    assert [one.kind for one in rows] == [DRIVER]

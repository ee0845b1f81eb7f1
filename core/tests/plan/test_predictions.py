"""Work, seconds, advice and records on a model of round numbers."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from small_plan import prediction

from drl.plan.advice import MARGIN, advise, budget, faster, fits, total
from drl.plan.predict import UNNAMED, Card, no_rates
from drl.plan.rates import (
    ACTIVATIONS,
    DRIVER,
    FORWARD,
    RECOMPUTED,
    SAMPLE,
    SYNC,
    TRAINING,
    Observation,
    RateKey,
    find_rates,
    read_table,
    record_rates,
)
from drl.plan.record import Measured, record_run
from drl.plan.scaling import scaled_lines
from drl.stages.pairs import BatchPlan

KEY = RateKey(device="Card", torch="2.11.0", dtype="bf16", compiled=False)
T = 1e12


@pytest.fixture(autouse=True)
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = tmp_path / "rates.json"
    monkeypatch.setenv("DRL_RATES", str(path))
    return path


def measure(key: RateKey = KEY, **values: float) -> None:
    """Record what a unit of work costs, by kind: a TFLOP, a call, a sample."""
    works = {FORWARD: T, TRAINING: T, RECOMPUTED: T, SAMPLE: 1.0, SYNC: 40.0}
    record_rates(
        key,
        [Observation(kind=k, work=works.get(k, 0.0), value=v) for k, v in values.items()],
    )


def test_work_of_an_iteration_by_hand() -> None:
    work = prediction().work
    # 2 batches of 8 rows, 5 steps, 1 TFLOP each; 32 pairs at 1 + 1
    assert (work.sampling, work.sampling_calls) == (80 * T, 10)
    assert (work.training, work.micro_batches, work.recomputed) == (64 * T, 4, 0)
    assert (work.decodes, work.megapixels, work.pushed) == (4, 16.0, 40)
    assert work.total == 144 * T


def test_work_of_guidance_filler_and_passes() -> None:
    assert prediction(branches=2).work.sampling_calls == 20
    batched = prediction(branches=2, batched=True).work
    assert (batched.sampling, batched.sampling_calls) == (160 * T, 10)
    assert prediction(samples=17).work.sampling == 3 * 8 * 5 * T
    passes = prediction(extra_passes=2).work
    assert (passes.scored, passes.scored_calls) == (64 * T, 8)
    # the first window's own forward is its old policy
    late = prediction(rescored=True, optimizer_steps=4, micro_batches=1).work
    assert (late.scored, late.scored_calls) == (24 * T, 3)
    assert prediction(checkpointed=0.5).work.recomputed == 16 * T


def test_seconds_are_work_by_rates() -> None:
    measure(forward=0.1, training=0.2, sample=0.01, sync=0.5, driver=0.25)
    seconds = prediction().seconds
    assert seconds == pytest.approx(
        {"rollout": 8.0 + 0.16, "train": 12.8, "update_weights": 0.5, "other": 0.25}
    )
    assert total(prediction()) == pytest.approx(21.71)


def test_second_forwards_go_at_a_forwards_rate_until_they_were_measured() -> None:
    measure(forward=0.1, training=0.2)
    again = prediction(checkpointed=1.0)
    assert again.work.recomputed == 32 * T
    assert again.seconds is not None
    assert again.seconds["train"] == pytest.approx(12.8 + 3.2)
    measure(recomputed=0.15)
    measured = prediction(checkpointed=1.0).seconds
    assert measured is not None
    assert measured["train"] == pytest.approx(12.8 + 4.8)


def test_engine_and_trainer_may_be_compiled_apart() -> None:
    measure(forward=0.1, training=0.2)
    half = prediction(engine_compiled=True)
    assert (half.seconds, half.lacking) == (None, ("rollout",))
    measure(RateKey(device="Card", torch="2.11.0", dtype="bf16", compiled=True), forward=0.05)
    seconds = prediction(engine_compiled=True).seconds
    assert seconds is not None
    assert (seconds["rollout"], seconds["train"]) == pytest.approx((4.0, 12.8))


def test_without_rates_there_are_no_seconds_and_nothing_is_made_up() -> None:
    found = prediction()
    assert (found.seconds, found.lacking, total(found)) == (None, ("rollout", "train"), None)
    assert found.work.total > 0
    assert "no measured rates for Card in bf16: run  drl bench RECIPE" in no_rates(found)
    assert "NVIDIA H200" in no_rates(found)


def named(name: str, dtype: str = "fp32", **changes: Any) -> str:
    return no_rates(replace(prediction(**changes), card=Card(name=name), dtype=dtype))


def test_rates_that_are_missing_are_told_by_dtype_and_compilation() -> None:
    h200 = named("NVIDIA H200")
    assert h200.startswith(
        "no measured rates for NVIDIA H200 in fp32: run  drl bench RECIPE  on it"
    )
    assert h200.endswith("; rates of NVIDIA H200 exist for bf16, bf16 compiled")
    mixed = named("Card", engine_compiled=True)
    assert "in fp32 and fp32 compiled: " in mixed
    measure(forward=0.1, training=0.2)
    assert "for Card in bf16 compiled: " in named("Card", "bf16", engine_compiled=True)


@pytest.mark.parametrize(
    ("name", "said"), [("nvidia h200", True), ("NVIDIA H2OO", False), ("NVIDIA H100", False)]
)
def test_another_spelling_of_a_card_is_recognised(name: str, said: bool) -> None:
    assert named(name).endswith("; did you mean 'NVIDIA H200'?") == said
    assert named(name).endswith("rates exist for 'NVIDIA H200' (--device-name)") != said


def test_a_card_without_a_name_needs_one_and_no_bench() -> None:
    said = named(UNNAMED)
    assert "an unnamed card" in said
    assert said.endswith("by --device-name: 'NVIDIA H200'")
    assert "drl bench" not in said


def test_what_does_not_fit_gets_changes_in_order_of_cost() -> None:
    found = prediction(own_weights="fp32")
    memory = int(found.largest.peak / (1 - MARGIN)) - 10
    assert not fits(found, memory)
    advice = advise(found, memory)
    assert [one.settings[0] for one in advice] == [
        'rollout.weights = "shared"',
        'text = "released"',
        "train.micro_batch_size = 4",
        "model.gradient_checkpointing = true",
        "lora.rank = 2",
        "cluster.offload = true",
    ]
    assert all(one.fits and one.room < found.largest.room for one in advice)
    assert advice[0].room == prediction().largest.peak


def test_graphs_count_for_the_card_and_are_the_first_to_go() -> None:
    plain, found = prediction(), prediction(graphs=True)
    memory = int(plain.largest.peak / (1 - MARGIN)) + 10
    assert fits(plain, memory)
    assert not fits(found, memory)
    first = advise(found, memory)[0]
    assert first.settings == ("rollout.graphs = false",)
    assert (first.room, first.fits) == (plain.largest.room, True)


def test_smaller_micro_batches_are_named_until_one_fits() -> None:
    found = prediction()
    memory = int(prediction(rows=2, micro_batches=16).largest.peak / (1 - MARGIN)) + 1
    rows = [one for one in advise(found, memory) if "micro_batch" in one.settings[0]]
    assert [(one.settings[0][-1], one.fits) for one in rows] == [("4", False), ("2", True)]


def test_where_no_change_is_enough_they_are_joined() -> None:
    found = prediction(own_weights="fp32")
    tight = int(prediction(released=frozenset({"text_encoder"})).largest.peak / (1 - MARGIN)) + 1
    *single, both = advise(found, tight)
    assert not any(one.fits for one in single)
    assert both.fits
    assert both.settings == ('rollout.weights = "shared"', 'text = "released"')


def test_what_can_never_fit_is_said_to_not_fit() -> None:
    last = advise(prediction(), 100)[-1]
    assert len(last.settings) > 3
    assert not last.fits


def test_a_recipe_that_fits_needs_no_change() -> None:
    assert advise(prediction(), 10**9) == []
    assert budget(1000) == 950


def test_faster_settings_are_those_that_still_fit() -> None:
    measure(forward=0.1, training=0.2)
    # a call costs as well: larger micro-batches pay
    record_rates(KEY, [Observation(kind=TRAINING, work=8 * T, value=1.0)])
    found = prediction(checkpointed=1.0)
    quick = faster(found, 10**9)
    assert quick[0].settings == ("model.gradient_checkpointing = false",)
    assert "train.micro_batch_size = 32" in {one.settings[0] for one in quick}
    seconds = [one.seconds for one in quick]
    assert seconds == sorted(seconds)
    now = total(found)
    assert now is not None
    assert all(one < now for one in seconds if one is not None)
    tight = int(found.largest.peak / (1 - MARGIN)) + 1
    assert faster(found, tight) == []


@pytest.mark.parametrize("checkpointed", [0.0, 1.0])
def test_a_recorded_run_is_predicted_as_it_was(checkpointed: float) -> None:
    run = prediction(checkpointed=checkpointed, extra_passes=1)
    shown = {"rollout": 9.0, "train": 14.0, "update_weights": 0.4}
    record_run(run, Measured(seconds=shown, iteration_s=24.0, source="bench"))
    again = prediction(checkpointed=checkpointed, extra_passes=1).seconds
    assert again == pytest.approx({**shown, "other": 0.6})
    # and again: a second bench of the same recipe does not pile anything up
    record_run(
        prediction(checkpointed=checkpointed, extra_passes=1),
        Measured(seconds=shown, iteration_s=24.0),
    )
    assert prediction(checkpointed=checkpointed, extra_passes=1).seconds == pytest.approx(
        {**shown, "other": 0.6}
    )


def test_what_a_rollout_takes_beyond_its_forwards_is_its_samples() -> None:
    measure(forward=0.1)
    record_run(prediction(), Measured(seconds={"rollout": 9.6}))
    rates = find_rates(KEY)
    assert rates is not None
    assert rates.value(SAMPLE, work=16) == pytest.approx(1.6)
    assert rates.value(FORWARD, work=T) == pytest.approx(0.1)


def test_a_compiled_run_shows_its_share_of_activations(own: Path) -> None:
    run = prediction(compiled=True)
    train = next(phase for phase in run.phases if phase.name == "train")
    resting = train.peak - train.activations
    record_run(run, Measured(seconds={"train": 2.0}, peak_bytes={"train": resting + 400}))
    (key,) = read_table(own).rows
    assert key.compiled
    kinds = {one.kind for one in read_table(own).rows[key]}
    assert kinds == {TRAINING, ACTIVATIONS}
    again = prediction(compiled=True)
    assert again.peak_bytes["train"] == pytest.approx(resting + 400, abs=1)
    # eager arithmetic needs no correction, and a run with recomputed blocks shows none
    record_run(prediction(), Measured(seconds={}, peak_bytes={"train": 1}))
    assert len(read_table(own).rows) == 1


def test_a_run_that_shows_nothing_writes_nothing(own: Path) -> None:
    assert record_run(prediction(), Measured(seconds={})) is None
    assert not own.exists()


def test_the_driver_is_what_no_phase_took() -> None:
    record_run(prediction(), Measured(seconds={"rollout": 1.0, "eval": 2.0}, iteration_s=3.5))
    rates = find_rates(KEY)
    assert rates is not None
    assert rates.value(DRIVER, work=0) == pytest.approx(0.5)


@pytest.mark.parametrize("gpus", [1, 4, 32])
def test_an_update_sees_the_same_images_on_any_number_of_gpus(gpus: int) -> None:
    plan = BatchPlan(
        prompts=32,
        samples_per_prompt=16,
        optimizer_steps=2,
        samples_per_step=256,
        pairs_per_sample=2,
        micro_batch_size=8,
    )
    first, last = scaled_lines(plan, [gpus])
    assert first == (
        f"{gpus} GPU(s): 256 images per update, {64 // gpus} micro-batches of 8 pairs on each"
    )
    assert "learning rate" in last
    assert scaled_lines(plan, []) == []

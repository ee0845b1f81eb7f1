"""Engines that lie, as third-party plugins around the local engine: each is caught, named, and closed."""

from __future__ import annotations

import gc
import re
import threading

import pytest
from e2e import metric_rows, run_here, set_words

from drl.errors import EngineError, SyncError, TrustError
from drl.interfaces.engine import CLIENTS
from drl.observe.directory import RunDirectory
from drl_cli.main import execute

STRANGERS = ("acme-recorder", "acme-engines")
QUIET = ("eval.datasets=[]", "train.num_rollout=2", "checkpoint.save_interval=1")


def sets_of(engine, *more):
    return (f"rollout.engine={engine}", f"rollout.{engine}.rows=4", *QUIET, *more)


def steps_taken(recorder):
    return sum(hook == "drl_step_finished" for hook, _ in recorder.CALLS)


def assert_all_is_closed(run_dir):
    """The lock is free, the engine is out of reach, and none of the run's threads is alive."""
    assert CLIENTS == {}
    assert not [t.name for t in threading.enumerate() if t.name.startswith("drl-")]
    with RunDirectory.open(run_dir):
        pass


@pytest.mark.parametrize(
    ("engine", "more", "message"),
    [
        (
            "acme_other_shift",
            ("sampling.flow_shift=3.0",),
            r"(?s)flow_shift.*rollout: \[1\.0000, 0\.6670.*training: \[1\.0000, 0\.8577",
        ),
        (
            "acme_other_guidance",
            ("sampling.guidance_scale=4.5",),
            r"guidance_scale: asked for 4\.5, used 6\.0",
        ),
        ("acme_other_window", (), r"were to be stochastic; the engine used"),
        ("acme_silent", (), r"says that it echoes .*guidance_scale.* came without"),
        ("acme_wrong_seed", (), r"asked for seed 1234, got 1235"),
        ("acme_wrong_size", (), r"1 frames of 16x32; the recipe asks for 1 of 32x32"),
        ("acme_wrong_version", (), r"weights of version -1, but the loop pushed version 0"),
        ("acme_wrong_member", (), r"asked for \(group, member, prompt row\) \(0, 0, 1\)"),
        ("acme_one_short", (), r"asked for 2 samples, got 1"),
    ],
    ids=lambda value: value if isinstance(value, str) and value.startswith("acme") else "",
)
def test_samples_that_are_not_as_asked_stop_the_first_rollout(
    recipe, tmp_path, recorder, engine, more, message
):
    with pytest.raises(TrustError, match=message):
        run_here(recipe, tmp_path / "run", *sets_of(engine, *more))
    assert steps_taken(recorder) == 0
    assert_all_is_closed(tmp_path / "run")


def test_an_engine_with_other_weights_is_found_by_parity_before_the_first_step(
    recipe, tmp_path, recorder
):
    with pytest.raises(TrustError, match=r"(?s)disagree before the first .*max_log_prob_diff"):
        run_here(recipe, tmp_path / "run", *sets_of("acme_other_weights"))
    assert steps_taken(recorder) == 0


def test_swallowed_updates_raise_the_alarm_at_the_first_sync_that_should_change_something(
    recipe, tmp_path, recorder
):
    message = "new weights were pushed .* but the engine's model did not change"
    with pytest.raises(SyncError, match=message):
        run_here(recipe, tmp_path / "run", *sets_of("acme_deaf"))
    versions = [given["version"] for hook, given in recorder.CALLS if hook == "drl_weights_synced"]
    assert versions == [0]  # the untrained adapters changed nothing, and rightly so
    assert_all_is_closed(tmp_path / "run")


def test_an_iteration_survives_the_sync_that_failed_after_it(recipe, tmp_path, recorder):
    with pytest.raises(SyncError):
        run_here(recipe, tmp_path / "run", *sets_of("acme_deaf"))
    saved = [given["path"].name for hook, given in recorder.CALLS if hook == "drl_checkpoint_saved"]
    assert saved == ["iter_0000001"]


def test_an_engine_that_swallows_the_weights_of_a_resume_is_found_by_parity(
    recipe, tmp_path, recorder
):
    with pytest.raises(SyncError):
        run_here(recipe, tmp_path / "run", *sets_of("acme_deaf"))
    with pytest.raises(TrustError, match="disagree before the first optimizer step"):
        run_here(recipe, tmp_path / "run", *sets_of("acme_deaf"), resume=True)


def test_renamed_layers_fail_the_first_sync_with_both_lists_of_names(recipe, tmp_path, recorder):
    with pytest.raises(SyncError) as caught:
        run_here(recipe, tmp_path / "run", *sets_of("acme_renaming"))
    text = str(caught.value)
    assert re.search(r"unknown to the engine \(\d+\): \['transformer_blocks\.0\.attn", text)
    expected = (
        r"expected but not sent \(\d+\): \['model\.diffusion_model\.transformer_blocks\.0\.attn"
    )
    assert re.search(expected, text)
    assert not any(hook == "drl_weights_synced" for hook, _ in recorder.CALLS)


LOSSES = {
    "acme_dropping": "lora_A never came, but the other matrix of the layer did",
    "acme_adding": "does not take these weights as they are named",
    "acme_reshaping": "do not fit the engine's model; nothing was applied",
    "acme_damaging": "arrived damaged: checksum",
}


@pytest.mark.parametrize("engine", LOSSES)
def test_each_damage_to_pushed_adapters_has_an_error_of_its_own(recipe, tmp_path, recorder, engine):
    with pytest.raises((EngineError, SyncError)) as caught:
        run_here(recipe, tmp_path / "run", *sets_of(engine))
    assert [name for name, text in LOSSES.items() if text in str(caught.value)] == [engine]
    assert_all_is_closed(tmp_path / "run")


@pytest.mark.parametrize(
    ("engine", "message"),
    [
        ("acme_dropping", r"sent \d+ tensors, the engine wrote \d+"),
        ("acme_adding", r"unknown to the engine \(1\): \['time_text_embed\.extra"),
        ("acme_reshaping", r"do not fit the engine's model"),
        ("acme_damaging", r"arrived damaged: checksum"),
    ],
    ids=lambda value: value if value.startswith("acme") else "",
)
def test_each_damage_to_pushed_full_weights_has_an_error_of_its_own(
    recipe, tmp_path, recorder, engine, message
):
    with pytest.raises((EngineError, SyncError), match=message):
        run_here(recipe, tmp_path / "run", *sets_of(engine, "lora.enabled=false"))


def test_a_proof_that_no_engine_can_give_is_refused(recipe, tmp_path, recorder):
    with pytest.raises(SyncError, match=r"sync\.verify = 'checksum' but an engine can only prove"):
        run_here(recipe, tmp_path / "run", *sets_of("acme_counting", "sync.verify=checksum"))


@pytest.mark.parametrize(
    ("engine", "message"),
    [
        ("acme_failing", "acme: out of memory"),
        ("acme_crashing", "internal error: ZeroDivisionError: acme: division by zero"),
    ],
    ids=lambda value: value if value.startswith("acme_") else "",
)
def test_an_engine_that_fails_in_a_rollout_ends_the_run_and_says_so(
    recipe, tmp_path, recorder, capfd, caplog, engine, message
):
    sets = set_words(sets_of(engine))
    assert execute(["run", str(recipe), "--run-dir", str(tmp_path / "run"), *sets]) == 1
    gc.collect()  # asyncio speaks of forgotten tasks when they are collected
    shown = capfd.readouterr()
    assert message in shown.err
    assert "Traceback" not in shown.err + shown.out
    assert [record.message for record in caplog.records if record.name == "asyncio"] == []
    finished, explained = recorder.CALLS[-2:]
    assert [finished[0], explained[0]] == ["drl_run_finished", "drl_explain_error"]
    assert finished[1]["error"] is explained[1]["error"]
    assert_all_is_closed(tmp_path / "run")


def test_nothing_is_trained_on_the_rollout_of_an_engine_that_failed(recipe, tmp_path, recorder):
    with pytest.raises(EngineError):
        run_here(recipe, tmp_path / "run", *sets_of("acme_failing"))
    assert steps_taken(recorder) == 0
    assert not list((tmp_path / "run" / "checkpoints").glob("*"))
    assert metric_rows(tmp_path / "run") == []

"""The whole loop on a tiny pipeline: what a run leaves behind, parity, resume, interruption."""

from __future__ import annotations

import json
import os
import shutil
import signal
import time
from pathlib import Path

import pytest
from e2e import (
    metric_rows,
    run_here,
    same,
    start_run,
    summary_of,
    trainer_state,
    without_trust,
    write_recipe,
)
from safetensors.torch import load_file

from drl.catalog import Catalog
from drl.config import load_recipe
from drl.errors import BadInput, RunDirectoryError, TrustError


@pytest.fixture
def recipe(tmp_path, checkpoint):
    return write_recipe(tmp_path, checkpoint)


@pytest.fixture(scope="module")
def finished(tmp_path_factory, checkpoint):
    """One finished run of six iterations, shared by the tests that only look at it."""
    folder = tmp_path_factory.mktemp("finished")
    path = write_recipe(folder, checkpoint)
    lines = run_here(path, folder / "run", "train.num_rollout=6")
    return folder / "run", lines


def test_a_run_leaves_recipe_versions_metrics_summary_report_and_adapter(finished):
    run_dir, lines = finished
    for name in ("recipe.toml", "plugins.json", "metrics.jsonl", "summary.json", "report.html"):
        assert (run_dir / name).stat().st_size > 0, name
    assert (run_dir / "adapter" / "adapter_config.json").is_file()
    for label in ("before", "after", "rollout-0000003", "rollout-0000006"):
        assert (run_dir / "samples" / label / "sheet.png").is_file()
    assert any(line.startswith("report ") for line in lines)
    assert any("held-out reward" in line for line in lines)
    assert [row["step"] for row in metric_rows(run_dir)] == [-1, 0, 1, 2, 3, 4, 5]


def test_the_stored_recipe_is_a_valid_recipe(finished):
    run_dir, _ = finished
    recipe = load_recipe(run_dir / "recipe.toml", catalog=Catalog.load())
    assert recipe.train.num_rollout == 6


def test_parity_is_exactly_zero_per_step_before_the_first_optimizer_step(finished):
    parity = summary_of(finished[0])["parity"]
    assert parity["rows"] == 16
    assert set(parity["by_step"].values()) == {0.0}


def test_the_first_update_is_on_policy_and_has_a_gradient(finished):
    first = metric_rows(finished[0])[1]
    assert first["train/ratio_mean_update_0"] == 1.0
    assert first["train/grad_norm"] > 0


def test_every_push_is_proven_by_checksum(finished):
    run_dir, _ = finished
    rows = [json.loads(line) for line in (run_dir / "sync.jsonl").read_text().splitlines()]
    assert [row["version"] for row in rows] == list(range(7))
    assert {row["verdict"] for row in rows} == {"checksum equal"}
    assert len({row["checksum"] for row in rows}) == 7


def test_phases_add_up_to_the_step_time(finished):
    run_dir, _ = finished
    for line in (run_dir / "metrics.jsonl").read_text().splitlines()[1:]:
        row = json.loads(line)
        phases = [
            value
            for key, value in row.items()
            if key.startswith("perf/") and key.endswith("_time") and key.count("/") == 1
        ]
        named = sum(phases) - row["perf/step_time"] - row.get("perf/train_wait_time", 0.0)
        assert named == pytest.approx(row["perf/step_time"], rel=0.05)


def test_evaluations_before_and_after_use_the_same_noise(finished):
    run_dir, _ = finished
    before, after = (
        json.loads((run_dir / "evaluations" / f"{label}.json").read_text())["rows"]
        for label in ("before", "after")
    )
    keys = [[(row["row"], row["seed"]) for row in rows] for rows in (before, after)]
    assert keys[0] == keys[1]


def test_inner_updates_are_logged_by_number(recipe, tmp_path):
    run_here(recipe, tmp_path / "run", "train.num_rollout=1", "train.num_steps_per_rollout=2")
    _, row = metric_rows(tmp_path / "run")
    assert row["train/ratio_mean_update_0"] == 1.0
    assert row["train/ratio_mean_update_1"] != 1.0


def test_the_same_recipe_gives_the_same_bits_and_another_seed_others(recipe, tmp_path, finished):
    for name, seed in (("a", 1234), ("b", 7)):
        run_here(recipe, tmp_path / name, "train.num_rollout=3", f"train.seed={seed}")
    original = trainer_state(finished[0], 3)
    assert same(trainer_state(tmp_path / "a", 3), original)
    assert not same(trainer_state(tmp_path / "b", 3), original)


def test_kill_9_and_resume_equals_the_straight_run_bit_for_bit(recipe, tmp_path, finished, zygote):
    run_dir = tmp_path / "killed"
    words = ["run", str(recipe), "--run-dir", str(run_dir), "--set", "train.num_rollout=6"]
    child = zygote.start(words, run_dir)
    rows = run_dir / "metrics.jsonl"
    four = child.wait_until(lambda: rows.is_file() and len(rows.read_text().splitlines()) >= 4)
    assert four, child.output
    child.signal(signal.SIGKILL)
    assert child.wait() == -signal.SIGKILL
    assert not (run_dir / "summary.json").exists()
    run_here(recipe, run_dir, "train.num_rollout=6", resume=True)
    assert same(trainer_state(run_dir, 6), trainer_state(finished[0], 6))
    assert without_trust(metric_rows(run_dir)) == without_trust(metric_rows(finished[0]))
    assert summary_of(run_dir)["heldout"] == summary_of(finished[0])["heldout"]
    # the engine merged the resumed adapter, the trainer applies it: equal within float32 rounding
    assert summary_of(run_dir)["parity"]["worst"] <= 1e-6


def test_ctrl_c_finishes_the_iteration_saves_and_says_how_to_resume(recipe, tmp_path):
    run_dir = tmp_path / "stopped"
    process = start_run(recipe, run_dir, "--set", "train.num_rollout=400")
    deadline = time.monotonic() + 120
    while not (run_dir / "metrics.jsonl").is_file():
        assert process.poll() is None, process.stdout.read()
        assert time.monotonic() < deadline
        time.sleep(0.02)
    process.send_signal(signal.SIGINT)
    output, _ = process.communicate(timeout=60)
    assert process.returncode == 130, output
    assert "--resume" in output
    assert "finishing this iteration" in output
    assert "Traceback" not in output
    done = metric_rows(run_dir)[-1]["step"] + 1
    tracker = run_dir / "checkpoints" / "latest_checkpointed_iteration.txt"
    assert int(tracker.read_text()) == done
    run_here(recipe, run_dir, f"train.num_rollout={done + 1}", resume=True)
    assert metric_rows(run_dir)[-1]["step"] == done


def test_resume_without_a_checkpoint_or_a_run_is_refused(recipe, tmp_path, finished):
    with pytest.raises(RunDirectoryError):
        run_here(recipe, tmp_path / "nowhere", resume=True)


def test_resume_under_another_recipe_names_the_differences(recipe, finished):
    with pytest.raises(BadInput, match=r"optimizer\.lr +0\.001 +0\.1 +changes"):
        run_here(recipe, finished[0], "optimizer.lr=0.1", "train.num_rollout=6", resume=True)


def test_a_run_directory_is_never_written_over(recipe, finished):
    before = (finished[0] / "metrics.jsonl").read_bytes()
    with pytest.raises(RunDirectoryError, match="--resume"):
        run_here(recipe, finished[0])
    assert (finished[0] / "metrics.jsonl").read_bytes() == before


def test_bf16_forward_stays_within_its_stated_limit(recipe, tmp_path):
    run_here(recipe, tmp_path / "run", "train.forward_dtype=bf16", "train.num_rollout=1")
    parity = summary_of(tmp_path / "run")["parity"]
    assert parity["worst"] <= parity["limit"]


def test_guidance_trains_with_the_empty_prompt_as_negative(recipe, tmp_path):
    run_here(recipe, tmp_path / "run", "sampling.guidance_scale=4.5", "train.num_rollout=1")
    assert set(summary_of(tmp_path / "run")["parity"]["by_step"].values()) == {0.0}


def test_flow_sde_with_kl_to_the_base_trains(recipe, tmp_path):
    run_here(
        recipe,
        tmp_path / "run",
        "sde.type=sde",
        "algorithm.kl_beta=0.1",
        "train.num_rollout=2",
        "train.num_steps_per_rollout=2",
    )
    _, first, second = metric_rows(tmp_path / "run")
    assert second["train/kl_loss"] > 0
    assert set(summary_of(tmp_path / "run")["parity"]["by_step"].values()) == {0.0}
    assert first["train/ratio_mean_update_0"] == 1.0


@pytest.mark.parametrize("weights", ["fp32", "forward"])
def test_full_weights_train_and_reach_the_engine(recipe, tmp_path, weights):
    run_here(
        recipe,
        tmp_path / "run",
        "lora.enabled=false",
        "optimizer.lr=1e-4",
        "train.forward_dtype=bf16",
        f"rollout.local.weights={weights}",
        "train.num_rollout=1",
    )
    rows = [json.loads(line) for line in (tmp_path / "run" / "sync.jsonl").read_text().splitlines()]
    assert {row["verdict"] for row in rows} == {"checksum equal"}
    weights = load_file(tmp_path / "run" / "model" / "transformer.safetensors")
    assert rows[-1]["tensors"] == len(weights)


def test_a_parity_limit_that_is_broken_stops_before_the_first_step(recipe, tmp_path):
    with pytest.raises(TrustError, match=r"trust\.max_log_prob_diff"):
        run_here(
            recipe,
            tmp_path / "run",
            "train.forward_dtype=bf16",
            "rollout.local.weights=fp32",
            "trust.max_log_prob_diff=1e-12",
            "train.micro_batch_size=3",
        )
    assert not list((tmp_path / "run" / "checkpoints").glob("iter_*"))


def test_no_child_process_is_left_after_a_run(recipe, tmp_path):
    text = recipe.read_text().replace('type = "jpeg"', 'type = "ocr"')
    recipe.write_text(text)
    run_here(recipe, tmp_path / "run", "train.num_rollout=1", "eval.datasets=[]")
    assert not [name for name in child_commands() if "spawn_main" in name]


def child_commands() -> list[str]:
    """Return the command lines of this process's children, whichever thread started them."""
    commands = []
    for status in Path("/proc").glob("[0-9]*/status"):
        try:
            text = status.read_text()
            if f"PPid:\t{os.getpid()}\n" in text:
                commands.append((status.parent / "cmdline").read_text())
        except OSError:  # it ended meanwhile
            continue
    return commands


def test_a_run_of_0_iterations_evaluates_once_and_ends(recipe, tmp_path):
    run_here(recipe, tmp_path / "run", "train.num_rollout=0")
    (row,) = metric_rows(tmp_path / "run")
    assert row["step"] == -1
    assert "eval/heldout" in row


def test_checkpoints_of_another_run_are_never_written_over(recipe, tmp_path):
    save = f'checkpoint.save="{tmp_path / "shared"}"'
    run_here(recipe, tmp_path / "a", save, "train.num_rollout=1")
    with pytest.raises(
        BadInput, match=r"checkpoint\.save: .* holds the checkpoints of another run"
    ):
        run_here(recipe, tmp_path / "b", save, "train.num_rollout=1")
    assert not (tmp_path / "b").exists()


def test_a_run_killed_between_save_and_evaluation_owes_nothing_after_resume(tmp_path, finished):
    """The checkpoint of the last iteration is there, its evaluation and row are not."""
    run_dir = tmp_path / "run"
    shutil.copytree(finished[0], run_dir)
    rows = (run_dir / "metrics.jsonl").read_text().splitlines(keepends=True)
    (run_dir / "metrics.jsonl").write_text("".join(rows[:-1]))
    (run_dir / "evaluations" / "after.json").unlink()
    (run_dir / "summary.json").unlink()
    run_here(finished[0].parent / "tiny.toml", run_dir, "train.num_rollout=6", resume=True)
    assert metric_rows(run_dir) == metric_rows(finished[0])
    assert summary_of(run_dir)["heldout"] == summary_of(finished[0])["heldout"]


def test_resume_alone_goes_on_with_the_newest_run_of_the_recipe(recipe, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for rollouts in (1, 2):
        run_here(recipe, None, f"train.num_rollout={rollouts}", "eval.datasets=[]")
    first, newest = sorted((tmp_path / "runs").iterdir(), key=lambda path: path.stat().st_mtime)
    run_here(recipe, None, "train.num_rollout=3", "eval.datasets=[]", resume=True)
    assert [row["step"] for row in metric_rows(newest)] == [0, 1, 2]
    assert [row["step"] for row in metric_rows(first)] == [0]

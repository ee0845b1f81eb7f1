"""Modes of whole runs: rollouts alone, measured steps, epochs, chosen starts, checks for CI."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from e2e import (
    RECIPE,
    checkpoint_folder,
    metric_rows,
    run_here,
    same,
    set_words,
    trained_weights,
    write_recipe,
)

import drl.loop
from drl.dumps import read_dump
from drl.errors import BadInput, CheckpointError, Interrupted
from drl.lora import read_peft

Drl = Callable[..., tuple[int, str, str]]
QUIET = ("eval.before_train=false", "eval.after_train=false")
PROBE = ("train/model_output_mean_abs_diff", "train/model_output_max_abs_diff")


@pytest.fixture(scope="module")
def recipe(tmp_path_factory: pytest.TempPathFactory, checkpoint: Path) -> Path:
    """The tiny recipe."""
    return write_recipe(tmp_path_factory.mktemp("modes"), checkpoint)


@pytest.fixture(scope="module")
def trained(recipe: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of two iterations that trains."""
    run_dir = tmp_path_factory.mktemp("trained") / "run"
    run_here(recipe, run_dir)
    return run_dir


def iterations(run_dir: Path) -> list[dict[str, Any]]:
    return [row for row in metric_rows(run_dir) if row["step"] >= 0]


def files_below(folder: Path) -> set[str]:
    return {str(f.relative_to(folder)) for f in folder.rglob("*") if f.is_file()}


def test_measured_steps_are_a_probe_of_the_forwards_alone(recipe: Path, tmp_path: Path) -> None:
    sets = ("debug.skip_optimizer_step=true", "debug.engine_debug=true", "ema.enabled=true")
    run_here(recipe, tmp_path / "run", *QUIET, *sets, "ema.rollout_policy=ema")
    rows = iterations(tmp_path / "run")
    for name in (*PROBE, "train/log_prob_mean_abs_diff", "train/ratio_abs_minus_1"):
        assert [row[name] for row in rows] == [0.0, 0.0], name
    assert [row["train/skipped_steps"] for row in rows] == [1.0, 1.0]
    assert [row["train/step"] for row in rows] == [0.0, 1.0]
    assert not any(name in row for row in rows for name in ("train/grad_norm", "train/ema_updates"))
    weights = trained_weights(tmp_path / "run", 2)
    assert all(t.abs().max() == 0 for name, t in weights.items() if "lora_B" in name)


def test_rollouts_alone_are_those_of_a_run_that_trains(
    recipe: Path, trained: Path, tmp_path: Path
) -> None:
    dump = f"debug.save_rollout_data={tmp_path}/dump/{{rollout_id}}"
    lines = run_here(recipe, tmp_path / "run", "debug.rollout_only=true", dump)
    assert any("nothing is trained (debug.rollout_only)" in line for line in lines)
    before, *rows = metric_rows(tmp_path / "run")
    assert before["eval/heldout"] == metric_rows(trained)[0]["eval/heldout"]
    right = iterations(trained)[0]
    assert {k: v for k, v in rows[0].items() if k.startswith("rollout/reward/raw")} == {
        k: v for k, v in right.items() if k.startswith("rollout/reward/raw")
    }
    assert not any(name.startswith("train/") for row in rows for name in row)
    assert files_below(tmp_path / "dump") == {"0", "1", "eval_0"}
    left = {path.name for path in (tmp_path / "run").iterdir()}
    assert not left & {"adapter", "model"}
    assert not list((tmp_path / "run").glob("checkpoints/*"))
    # and what was dumped can be trained on
    again = f"debug.load_rollout_data={tmp_path}/dump/{{rollout_id}}"
    run_here(recipe, tmp_path / "trained", again, "train.num_rollout=1")
    weights = trained_weights(tmp_path / "trained", 1)
    run_here(recipe, tmp_path / "straight", *QUIET, "train.num_rollout=1")
    assert same(weights, trained_weights(tmp_path / "straight", 1))


def test_rollouts_alone_come_from_the_adapter_that_a_run_starts_from(
    recipe: Path, trained: Path, tmp_path: Path
) -> None:
    """What an engine cannot read by itself is pushed: an adapter, or a checkpoint of another run."""
    means = {}
    sources = {
        "base": (),
        "adapter": (f"lora.adapter_path={trained}/adapter",),
        "checkpoint": (f"checkpoint.load={trained}", "train.num_rollout=3"),
    }
    for name, sets in sources.items():
        only = ("debug.rollout_only=true", "train.num_rollout=1", "eval.before_train=true")
        run_here(recipe, tmp_path / name, *only, *sets)
        means[name] = iterations(tmp_path / name)[-1]["rollout/reward/raw_mean"]
    assert means["adapter"] != means["base"]
    assert iterations(tmp_path / "checkpoint")[0]["step"] == 2
    _, tensors = read_peft(trained / "adapter")
    assert any(tensor.abs().max() > 0 for name, tensor in tensors.items() if "lora_B" in name)


def test_rollouts_alone_keep_nothing_to_resume_from(recipe: Path, tmp_path: Path) -> None:
    sets = ("debug.rollout_only=true", *QUIET)
    run_here(recipe, tmp_path / "run", *sets, "train.num_rollout=1")
    with pytest.raises(
        BadInput, match=r"--resume: debug\.rollout_only keeps nothing to go on from"
    ):
        run_here(recipe, tmp_path / "run", *sets, resume=True)


def test_rollouts_alone_end_after_an_iteration_when_asked(
    recipe: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    collect = drl.loop.collect

    def interrupted(run: Any, rollout_id: int) -> Any:
        os.kill(os.getpid(), signal.SIGINT)
        return collect(run, rollout_id)

    monkeypatch.setattr(drl.loop, "collect", interrupted)
    with pytest.raises(Interrupted, match=r"after iteration 1; debug\.rollout_only keeps nothing"):
        run_here(recipe, tmp_path / "run", "debug.rollout_only=true", *QUIET)
    assert len(iterations(tmp_path / "run")) == 1


def test_epochs_give_the_length_and_end_with_a_save_and_an_evaluation(
    checkpoint: Path, tmp_path: Path
) -> None:
    """3 rows in batches of 1: an epoch is 3 iterations, and an interval of 2 counts besides."""
    text = RECIPE.replace("num_rollout = 2", "num_epoch = 2").replace(
        "batch_size = 2", "batch_size = 1"
    )
    text = text.replace("save_interval = 3", "save_interval = 2")
    recipe = write_recipe(tmp_path / "recipe", checkpoint, text)
    lines = run_here(recipe, tmp_path / "run", "eval.interval=2", "eval.before_train=false")
    assert any("6 iterations on cpu" in line for line in lines)
    rows = iterations(tmp_path / "run")
    assert [row["step"] for row in rows] == list(range(6))
    assert [row["step"] + 1 for row in rows if "eval/heldout" in row] == [2, 3, 4, 6]
    saved = sorted(path.name for path in (tmp_path / "run/checkpoints").glob("iter_*"))
    assert saved == [f"iter_{number:07d}" for number in (2, 3, 4, 6)]
    again = run_here(
        recipe, tmp_path / "run", "eval.interval=2", "eval.before_train=false", resume=True
    )
    assert not any("changed since" in line for line in again)


def test_epochs_without_a_full_batch_are_refused_before_anything_is_written(
    checkpoint: Path, tmp_path: Path
) -> None:
    text = RECIPE.replace("num_rollout = 2", "num_epoch = 2").replace(
        "batch_size = 2", "batch_size = 4"
    )
    recipe = write_recipe(tmp_path / "recipe", checkpoint, text)
    with pytest.raises(BadInput, match=r"3 rows of data\.source 'jsonl' are fewer than"):
        run_here(recipe, tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_a_fresh_run_starts_at_the_chosen_iteration(recipe: Path, tmp_path: Path) -> None:
    run_here(recipe, tmp_path / "run", "train.start_rollout_id=1", "train.num_rollout=3", *QUIET)
    assert [row["step"] for row in iterations(tmp_path / "run")] == [1, 2]
    assert checkpoint_folder(tmp_path / "run", 3).is_dir()


def test_a_chosen_start_wins_over_that_of_a_checkpoint(
    recipe: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The data go on where the run was after that iteration; without a checkpoint of it they begin anew."""
    sets = (*QUIET, "checkpoint.save_interval=1")
    run_here(recipe, tmp_path / "first", *sets, "train.num_rollout=2")
    source = (f"checkpoint.load={tmp_path / 'first'}", "train.num_rollout=3")
    state = json.loads((checkpoint_folder(tmp_path / "first", 1) / "run.json").read_text())
    assert state["data"]["position"] == 2
    prompts = {}
    for first in (1, 2, 0):
        dump = f"debug.save_rollout_data={tmp_path}/{first}/{{rollout_id}}"
        start = (f"train.start_rollout_id={first}", f"train.num_rollout={first + 1}")
        run_here(recipe, tmp_path / f"from-{first}", *sets, *source, *start, dump)
        rollout = read_dump(tmp_path / str(first) / str(first), "rollout")
        prompts[first] = [group.prompt.row for group in rollout["groups"]]
        assert [row["step"] for row in iterations(tmp_path / f"from-{first}")] == [first]
    assert prompts == {0: [1, 2], 1: [3, 1], 2: [2, 3]}
    with pytest.raises(CheckpointError, match="ends there or before"):
        run_here(recipe, tmp_path / "no", *sets, source[0], "train.num_rollout=2")


def test_no_iteration_at_all_evaluates_what_was_loaded(
    recipe: Path, trained: Path, tmp_path: Path
) -> None:
    run_here(recipe, tmp_path / "base", "train.num_rollout=0")
    load = f"checkpoint.load={trained}"
    run_here(recipe, tmp_path / "loaded", load, "train.num_rollout=0", "eval.before_train=false")
    left = {path.name for path in (tmp_path / "loaded").iterdir()}
    assert not left & {"adapter", "model", "checkpoints"}
    with pytest.raises(BadInput, match=r"evaluate it by a new run with checkpoint\.load"):
        run_here(recipe, trained, "train.num_rollout=0", resume=True)
    before, after = metric_rows(trained)[0], iterations(trained)[-1]
    assert metric_rows(tmp_path / "base") == [before]
    assert metric_rows(tmp_path / "loaded") == [{"step": -1, "eval/heldout": after["eval/heldout"]}]


@pytest.mark.parametrize(("threshold", "code"), [(-2.0, 0), (0.5, 1)])
def test_a_check_of_the_evaluations_is_an_exit_code(
    recipe: Path, tmp_path: Path, drl: Drl, threshold: float, code: int
) -> None:
    sets = set_words(
        [
            "debug.ci.enabled=true",
            "debug.ci.metric_key=eval/heldout",
            f"debug.ci.metric_threshold={threshold}",
            "train.num_rollout=0",
        ]
    )
    found, out, err = drl("run", str(recipe), "--run-dir", str(tmp_path / "run"), *sets)
    assert found == code
    if code == 0:
        assert "debug.ci: eval/heldout -1.076" in out
    else:
        assert "debug.ci: eval/heldout reached -1.076" in err
        assert "  before: -1.076" in err
        assert "--resume" not in err
        assert "Traceback" not in err
    assert (tmp_path / "run" / "report.html").is_file()


def test_the_environment_of_the_recipe_is_there_while_the_run_is(
    recipe: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = []
    collect = drl.loop.collect

    def noted(run: Any, rollout_id: int) -> Any:
        seen.append(os.environ.get("ACME_MODE"))
        return collect(run, rollout_id)

    monkeypatch.setattr(drl.loop, "collect", noted)
    sets = ("debug.rollout_only=true", *QUIET, "train.num_rollout=1")
    run_here(recipe, tmp_path / "run", *sets, 'train.env={ACME_MODE="quick"}')
    assert seen == ["quick"]
    assert "ACME_MODE" not in os.environ


def test_a_run_without_the_logger_jsonl_ends_with_a_summary_and_a_report(
    recipe: Path, tmp_path: Path
) -> None:
    sets = ('logging.loggers=["console"]', "eval.datasets=[]", "train.num_rollout=1")
    run_here(recipe, tmp_path / "run", *sets)
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary["train_seconds"] == 0.0
    assert summary["iterations"] == 1
    assert "metrics.jsonl" in (tmp_path / "run" / "report.html").read_text()  # named as missing

"""What a run may go on from, and what may differ when it does: changed recipes, other runs, trust."""

from __future__ import annotations

import json
import os
import pickle
from types import SimpleNamespace

import pytest
from e2e import (
    checkpoint_folder,
    metric_rows,
    run_here,
    same,
    set_words,
    trained_weights,
    trainer_state,
    without_trust,
)

from drl.checkpoint import damage, read_meta
from drl.checkpoint.folders import TRACKER, checkpoints_in
from drl.checkpoint.manifest import write_manifest
from drl.errors import BadInput, CheckpointError
from drl.launch import find_directory
from drl_cli.main import execute
from drl_family_sd3.tiny import build_random

STRANGERS = ()
QUIET = ("eval.datasets=[]", "checkpoint.save_interval=1")
TWO, FOUR = ("train.num_rollout=2", *QUIET), ("train.num_rollout=4", *QUIET)


@pytest.fixture(scope="module")
def straight(lab):
    """Four iterations at one go."""
    run_here(lab / "tiny.toml", lab / "straight", *FOUR)
    return lab / "straight"


@pytest.fixture(scope="module")
def begun(lab):
    """A run of two iterations; tests resume copies of it."""
    run_here(lab / "tiny.toml", lab / "begun", *TWO)
    return lab / "begun"


@pytest.fixture
def half(begun, tmp_path):
    import shutil

    return shutil.copytree(begun, tmp_path / "half")


def resumed(recipe, run_dir, *sets, words=()):
    """Resume by the command line; return its exit code."""
    command = ["run", str(recipe), "--run-dir", str(run_dir), "--resume", *words]
    return execute([*command, *set_words(sets)])


def test_a_change_of_meaning_is_shown_as_a_table_and_refused(recipe, half, capfd):
    before = sorted(path for path in half.rglob("*"))
    sets = (*FOUR, "optimizer.lr=2e-3", "logging.loggers=jsonl")
    assert resumed(recipe, half, *sets) == 2
    shown = " ".join(capfd.readouterr().err.split())
    assert "was made by another recipe: option was is meaning" in shown
    assert "optimizer.lr 0.001 0.002 changes what an iteration computes" in shown
    assert "train.num_rollout 2 4 does not change an iteration" in shown
    assert "let it through: --allow-changed optimizer.lr" in shown
    assert sorted(path for path in half.rglob("*")) == before


def test_a_change_that_is_allowed_by_name_takes_effect(recipe, half, straight, capfd):
    sets = (*FOUR, "optimizer.lr=2e-3")
    assert resumed(recipe, half, *sets, words=("--allow-changed", "optimizer.lr")) == 0
    shown = capfd.readouterr().out
    assert "changed since the run was last started:" in shown
    assert "changes what an iteration computes, allowed" in shown
    assert [row["train/lr"] for row in metric_rows(half)] == [1e-3, 1e-3, 2e-3, 2e-3]
    assert not same(trained_weights(half, 4), trained_weights(straight, 4))


def test_allowing_one_change_does_not_allow_another(recipe, half, capfd):
    sets = (*FOUR, "optimizer.lr=2e-3", "train.seed=5")
    assert resumed(recipe, half, *sets, words=("--allow-changed", "optimizer.lr")) == 2
    assert "--allow-changed train.seed" in capfd.readouterr().err


def test_a_key_that_nobody_knows_is_an_error_with_the_nearest(recipe, half, capfd):
    assert resumed(recipe, half, *FOUR, words=("--allow-changed", "optimizer.lrr")) == 2
    assert "optimizer.lr" in capfd.readouterr().err


def test_allowing_is_about_resuming(recipe, tmp_path, capfd):
    words = ["run", str(recipe), "--run-dir", str(tmp_path / "x"), "--allow-changed", "train.seed"]
    assert execute(words) == 2
    assert "add --resume" in capfd.readouterr().err
    assert not (tmp_path / "x").exists()


def test_another_rank_is_refused_by_the_checkpoint_itself_when_allowed(recipe, half, capfd):
    sets = (*FOUR, "lora.rank=8")
    assert resumed(recipe, half, *sets, words=("--allow-changed", "lora.rank")) == 2
    shown = capfd.readouterr().err
    assert "does not fit this recipe's model" in shown
    assert "of another shape" in shown


def test_a_synchronous_run_ends_in_the_same_state_and_has_the_same_files(
    recipe, tmp_path, straight
):
    run_here(recipe, tmp_path / "run", *FOUR, "checkpoint.asynchronous=false")
    assert same(trainer_state(tmp_path / "run", 4), trainer_state(straight, 4))
    for part in ("model", "optimizer"):
        for file in (checkpoint_folder(straight, 4) / part).iterdir():
            other = checkpoint_folder(tmp_path / "run", 4) / part / file.name
            assert other.read_bytes() == file.read_bytes()


def test_what_a_save_blocks_and_what_it_takes_beside_are_logged(straight):
    rows = [json.loads(line) for line in (straight / "metrics.jsonl").read_text().splitlines()]
    assert all(row["perf/save_block_time"] > 0 for row in rows)
    assert all("perf/overlapped/save_time" in row for row in rows[1:])


def test_dropout_draws_the_same_numbers_after_a_resume(recipe, tmp_path, begun):
    """Dropout is drawn from global generators; the trainer's own stream of them is in the checkpoint."""
    dropout = ("lora.dropout=0.3", "trust.parity=false")
    run_here(recipe, tmp_path / "straight", *TWO, *dropout)
    for total in (1, 2):
        sets = (f"train.num_rollout={total}", *QUIET, *dropout)
        run_here(recipe, tmp_path / "run", *sets, resume=total > 1)
    assert same(trainer_state(tmp_path / "run", 2), trainer_state(tmp_path / "straight", 2))
    assert metric_rows(tmp_path / "run") == metric_rows(tmp_path / "straight")
    assert not same(trained_weights(begun, 2), trained_weights(tmp_path / "run", 2))


def test_a_new_run_from_another_ones_state_ends_where_that_would_have(
    recipe, tmp_path, begun, straight
):
    lines = run_here(recipe, tmp_path / "run", *FOUR, f"checkpoint.load={begun}")
    assert any(f"starts from {checkpoint_folder(begun, 2)}, after iteration 2" in x for x in lines)
    assert same(trainer_state(tmp_path / "run", 4), trainer_state(straight, 4))
    rows = without_trust(metric_rows(tmp_path / "run"))
    assert rows == without_trust(metric_rows(straight))[2:]
    assert [row["step"] for row in rows] == [2, 3]
    assert list(checkpoints_in(tmp_path / "run" / "checkpoints")) == [3, 4]
    assert list(checkpoints_in(begun / "checkpoints")) == [1, 2]


def test_a_run_that_was_loaded_can_itself_be_resumed(recipe, tmp_path, begun, straight):
    load = f"checkpoint.load={begun / 'checkpoints'}"
    run_here(recipe, tmp_path / "run", "train.num_rollout=3", *QUIET, load)
    run_here(recipe, tmp_path / "run", *FOUR, load, resume=True)
    assert same(trainer_state(tmp_path / "run", 4), trainer_state(straight, 4))


def test_an_earlier_step_and_what_of_it_is_taken(recipe, tmp_path, begun, straight):
    load = (f"checkpoint.load={begun}", "checkpoint.step=1", "checkpoint.load_optim=false")
    run_here(recipe, tmp_path / "run", *TWO, *load)
    ours, theirs = (trained_weights(path, 2) for path in (tmp_path / "run", straight))
    assert ours.keys() == theirs.keys()
    assert not same(ours, theirs)  # Adam without moments takes another step
    state = trainer_state(tmp_path / "run", 2)
    steps = {float(value) for name, value in state.items() if name.endswith("/step")}
    assert steps == {1.0}


def test_the_schedule_of_the_checkpoint_holds_unless_it_is_overridden(recipe, tmp_path, begun):
    load = (f"checkpoint.load={begun}", "train.num_rollout=3", *QUIET, "optimizer.lr=5e-3")
    lines = run_here(recipe, tmp_path / "theirs", *load)
    assert metric_rows(tmp_path / "theirs")[0]["train/lr"] == 1e-3
    assert any("lr is 0.001 in the checkpoint, 0.005 in the recipe" in line for line in lines)
    run_here(recipe, tmp_path / "ours", *load, "optimizer.override_lr_scheduler=true")
    assert metric_rows(tmp_path / "ours")[0]["train/lr"] == 5e-3
    with pytest.raises(CheckpointError, match=r"lr is 0\.001 in the checkpoint"):
        run_here(recipe, tmp_path / "equal", *load, "optimizer.use_checkpoint_lr_scheduler=false")


def test_other_prompts_begin_at_their_start_and_it_is_said(recipe, tmp_path, begun):
    (tmp_path / "other.jsonl").write_text(
        '{"input": "another sign", "metadata": {"target": "1"}}\n'
    )
    lines = run_here(
        recipe,
        tmp_path / "run",
        "train.num_rollout=3",
        *QUIET,
        f"checkpoint.load={begun}",
        f"data.prompt_data={tmp_path / 'other.jsonl'}",
    )
    assert any("the data begin anew, not where the checkpoint was" in line for line in lines)


@pytest.mark.parametrize(
    ("sets", "words"),
    [
        (("checkpoint.load={tmp}/nowhere",), "there is no folder"),
        (("checkpoint.load={tmp}",), "has no checkpoints"),
        (("checkpoint.load={begun}", "checkpoint.step=9"), "it has 1, 2"),
        (("checkpoint.load={begun}", "train.num_rollout=2"), "train.num_rollout = 2 ends there"),
    ],
)
def test_what_cannot_be_loaded_is_said_before_anything_is_written(
    recipe, tmp_path, begun, sets, words
):
    given = [text.format(tmp=tmp_path, begun=begun) for text in sets]
    with pytest.raises(BadInput, match=r"checkpoint|folder") as caught:
        run_here(recipe, tmp_path / "run", *FOUR, *given)
    assert words in str(caught.value)
    assert not (tmp_path / "run").exists()


def test_adapters_are_not_loaded_onto_another_base(recipe, tmp_path, begun):
    build_random(tmp_path / "other", seed=1)
    with pytest.raises(CheckpointError, match="trained on the base model"):
        run_here(
            recipe,
            tmp_path / "run",
            *FOUR,
            f"checkpoint.load={begun}",
            f"model.checkpoint={tmp_path / 'other'}",
        )


def test_a_moved_base_is_the_same_base(recipe, tmp_path, begun, straight):
    build_random(tmp_path / "moved", seed=0)
    moved = f"model.checkpoint={tmp_path / 'moved'}"
    run_here(recipe, tmp_path / "run", *FOUR, f"checkpoint.load={begun}", moved)
    assert same(trained_weights(tmp_path / "run", 4), trained_weights(straight, 4))


def test_without_the_optimizers_state_only_a_new_optimizer_goes_on(recipe, tmp_path, capfd):
    sets = (*TWO, "checkpoint.save_optim=false")
    run_here(recipe, tmp_path / "run", *sets)
    folder = checkpoint_folder(tmp_path / "run", 2)
    assert not (folder / "optimizer").exists()
    assert read_meta(folder)["optimizer"] == "not saved"
    more = ("train.num_rollout=3", *QUIET, "checkpoint.save_optim=false")
    assert resumed(recipe, tmp_path / "run", *more) == 2
    assert "set checkpoint.load_optim = false" in capfd.readouterr().err
    assert resumed(recipe, tmp_path / "run", *more, "checkpoint.load_optim=false") == 0


class Runs:
    """Unpickling it makes a folder."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.mkdir, (str(self.path),)


def test_a_checkpoint_with_a_program_in_it_is_refused_and_only_trust_runs_it(
    recipe, tmp_path, half, capfd
):
    folder = checkpoint_folder(half, 2)
    file = folder / "optimizer" / ".metadata"
    metadata = pickle.loads(file.read_bytes())
    metadata.planner_data = Runs(tmp_path / "it-ran")
    file.write_bytes(pickle.dumps(metadata))
    write_manifest(folder)
    assert damage(folder) is None  # whoever wrote the program also wrote the checksums
    assert resumed(recipe, half, *FOUR) == 2
    shown = capfd.readouterr().err
    assert "is refused: it names posix.mkdir" in shown
    assert "--trust-checkpoint" in shown
    assert not (tmp_path / "it-ran").exists()
    assert resumed(recipe, half, *FOUR, words=("--trust-checkpoint",)) == 0
    assert (tmp_path / "it-ran").is_dir()


KEEP = (
    "train.num_rollout=4",
    "checkpoint.save_interval=1",
    "eval.interval=1",
    "checkpoint.keep_last=1",
    "checkpoint.keep_best=1",
    "checkpoint.best_metric=eval/heldout",
)


def test_the_newest_and_the_best_stay_and_the_list_says_why(recipe, tmp_path, capfd):
    run_dir = tmp_path / "run"
    run_here(recipe, run_dir, *KEEP)
    scores = {
        row["step"] + 1: row["eval/heldout"]
        for row in metric_rows(run_dir)
        if row["step"] >= 0 and "eval/heldout" in row
    }
    assert list(scores) == [1, 2, 3, 4]
    best = max(scores, key=lambda number: (scores[number], -number))
    assert list(checkpoints_in(run_dir / "checkpoints")) == sorted({best, 4})
    capfd.readouterr()
    assert execute(["checkpoints", str(run_dir), "--json"]) == 0
    rows = json.loads(capfd.readouterr().out)
    assert [row["iterations"] for row in rows] == sorted({best, 4})
    by_number = {row["iterations"]: row for row in rows}
    assert "best 1" in by_number[best]["why"]
    assert "newest" in by_number[4]["why"]
    assert by_number[best]["score"] == pytest.approx(scores[best])
    assert all(row["problem"] is None for row in rows)


def test_the_list_for_people_names_damage(half, capfd):
    (checkpoint_folder(half, 1) / "run.json").write_text("{}")
    assert execute(["checkpoints", str(half)]) == 0
    _, first, last = capfd.readouterr().out.splitlines()
    assert "damaged: run.json differs from its checksum" in first
    assert last.startswith("iter_0000002 *")
    assert last.split()[-2:] == ["good", "newest"]


def test_a_list_of_nothing(tmp_path, capfd):
    assert execute(["checkpoints", str(tmp_path / "nowhere")]) == 2
    assert "there is no folder" in capfd.readouterr().err
    (tmp_path / "empty").mkdir()
    assert execute(["checkpoints", str(tmp_path / "empty")]) == 0
    assert "has no checkpoints" in capfd.readouterr().out


def test_the_tracker_is_the_last_word(recipe, half, straight):
    """Going on from an older checkpoint gives the same end."""
    (half / "checkpoints" / TRACKER).write_text("1\n")
    run_here(recipe, half, *FOUR, resume=True)
    assert same(trainer_state(half, 4), trainer_state(straight, 4))


def test_the_run_that_is_resumed_has_the_name_of_the_recipe(tmp_path):
    names = {
        "tiny-20260101-000000": 1.0,
        "tiny-20260101-000000-2": 2.0,
        "tiny-align-20260102-000000": 3.0,
        "tiny-nft-20260103-000000": 4.0,
        "tiny-20260104": 5.0,
    }
    for name, moment in names.items():
        folder = tmp_path / name
        folder.mkdir()
        (folder / "lock.json").write_text("{}")
        (folder / "recipe.toml").write_text("")
        os.utime(folder, (moment, moment))
    section = SimpleNamespace(directory=str(tmp_path), name="tiny")
    with find_directory(SimpleNamespace(run=section), None, resume=True) as found:
        assert found.path.name == "tiny-20260101-000000-2"

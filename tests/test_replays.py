"""Replays of whole runs: what was dumped trains again to the bit, and engine and trainer are compared."""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from e2e import (
    RECIPE,
    final_state,
    metric_rows,
    run_here,
    same,
    set_words,
    start_run,
    trained_weights,
    write_recipe,
)

from drl.dumps import read_dump
from drl.errors import BadInput, DataError

QUIET = ("eval.before_train=false", "eval.after_train=false")
PROBE = ("train/model_output_mean_abs_diff", "train/model_output_max_abs_diff")
NOT_IN_A_REPLAY = (*PROBE, "train/model_output_rel_max", "eval/heldout")


NFT = {
    '[sde]\ntype = "cps"\nstep_strategy = "sde_window"\nnum_steps = 2\n': '[sde]\ntype = "ode"\n',
    "\n[sde.sde_window]\nrange = [0, 3]\n": "",
    "[algorithm.policy_loss]\nclip_range = 1e-2\n": '[algorithm]\nloss = "nft"\n',
}
SUPERVISED = """
[model]
checkpoint = "{checkpoint}"
[data]
source = "glyphs"
[data.glyphs]
count = 4
[sampling]
width = 48
height = 16
[rollout]
batch_size = 2
[algorithm]
loss = "sft_loss"
[train]
train_only = true
num_rollout = 2
"""


@pytest.fixture(scope="module")
def recipe(tmp_path_factory: pytest.TempPathFactory, checkpoint: Path) -> Path:
    """The tiny recipe."""
    return write_recipe(tmp_path_factory.mktemp("replays"), checkpoint)


@pytest.fixture(scope="module")
def recorded(recipe: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a run of two iterations (``run``) and all that it dumped (``dump``)."""
    root = tmp_path_factory.mktemp("recorded")
    dump = f"debug.dump_details={root / 'dump'}"
    run_here(recipe, root / "run", dump, "debug.engine_debug=true")
    return root


def replayed(recorded: Path) -> str:
    """The setting that replays the recorded rollouts."""
    return f"debug.load_rollout_data={recorded}/dump/rollout_data/{{rollout_id}}.safetensors"


def iterations(run_dir: Path) -> list[dict[str, Any]]:
    return [row for row in metric_rows(run_dir) if row["step"] >= 0]


def without(row: Mapping[str, Any], *names: str) -> dict[str, Any]:
    return {name: value for name, value in row.items() if name not in names}


def files_below(folder: Path) -> set[str]:
    return {str(f.relative_to(folder)) for f in folder.rglob("*") if f.is_file()}


def environments_of_children(pid: int) -> list[str]:
    """What the processes that a process started were given, as far as they still run."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            parent = int((folder / "stat").read_text().rpartition(")")[2].split()[1])
            if parent == pid:
                found.append((folder / "environ").read_bytes().decode(errors="replace"))
        except OSError:
            continue
    return found


def test_a_replay_trains_bit_for_bit_as_the_run_that_was_recorded(
    recipe: Path, recorded: Path, tmp_path: Path
) -> None:
    lines = run_here(recipe, tmp_path / "run", replayed(recorded))
    assert any(line.endswith(".safetensors, no engine") for line in lines)
    assert same(final_state(recorded / "run"), final_state(tmp_path / "run"))
    rows = [iterations(folder / "run") for folder in (recorded, tmp_path)]
    assert [without(row, *NOT_IN_A_REPLAY) for row in rows[0]] == rows[1]
    assert not (tmp_path / "run" / "sync.jsonl").exists()
    assert not list((tmp_path / "run").glob("evaluations/*"))


@pytest.mark.parametrize("loss", ["nft", "sft_loss"])
def test_every_kind_of_loss_replays(checkpoint: Path, tmp_path: Path, loss: str) -> None:
    """Final latents alone, and records that nobody generated."""
    text = RECIPE if loss == "nft" else SUPERVISED
    for old, new in NFT.items() if loss == "nft" else ():
        text = text.replace(old, new)
    recipe = write_recipe(tmp_path, checkpoint, text)
    quiet = QUIET if loss == "nft" else ()
    dump = f"debug.save_rollout_data={tmp_path}/dump/{{rollout_id}}"
    run_here(recipe, tmp_path / "first", *quiet, dump)
    run_here(recipe, tmp_path / "again", *quiet, dump.replace("save", "load"))
    assert same(final_state(tmp_path / "first"), final_state(tmp_path / "again"))


def test_dumps_hold_what_passed_between_the_stages(recorded: Path) -> None:
    assert files_below(recorded / "dump") == {
        *(f"rollout_data/{name}.safetensors" for name in ("0", "1", "eval_0", "eval_2")),
        *(f"train_data/{name}_0.safetensors" for name in ("0", "1")),
    }
    rollout = read_dump(recorded / "dump/rollout_data/1.safetensors", "rollout")
    samples = [sample for group in rollout["groups"] for sample in group.samples]
    assert [sample.index for sample in samples] == list(range(8, 16))
    assert all(sample.trajectory.debug["model_outputs"].shape[0] == 4 for sample in samples)
    shard = read_dump(recorded / "dump/train_data/1_0.safetensors", "shard")
    assert len(shard["pairs"]) == 16
    rows = {pair.id: pair for pair in shard["pairs"]}
    for sample in samples:
        for step in sample.trajectory.sde_steps:
            pair = rows[sample.index, step]
            assert torch.equal(pair.tensors["visual"], sample.trajectory.at(step)["visual"])
            assert pair.values["raw_reward"] == sample.reward
    evaluation = read_dump(recorded / "dump/rollout_data/eval_2.safetensors", "evaluation")
    scores = [sample.reward for sample in evaluation["sets"]["heldout"]]
    assert sum(scores) / 3 == pytest.approx(iterations(recorded / "run")[-1]["eval/heldout"])


def test_a_new_run_writes_over_no_dump_and_leaves_no_run_directory(
    recipe: Path, recorded: Path, tmp_path: Path
) -> None:
    with pytest.raises(BadInput, match=r"rollout_data/eval_0\.safetensors exists already"):
        run_here(recipe, tmp_path / "run", f"debug.dump_details={recorded / 'dump'}")
    assert not (tmp_path / "run").exists()


def test_half_of_a_replay_is_whole_groups(recipe: Path, recorded: Path, tmp_path: Path) -> None:
    sets = (replayed(recorded), "debug.load_rollout_subsample=0.5", "train.num_rollout=1")
    dump = f"debug.save_train_data={tmp_path}/{{rollout_id}}_{{rank}}"
    run_here(recipe, tmp_path / "run", *sets, dump)
    (row,) = iterations(tmp_path / "run")
    assert row["rollout/reward/raw_num_samples"] == 4.0
    ids = {pair.id[0] for pair in read_dump(tmp_path / "0_0", "shard")["pairs"]}
    assert ids == {4, 5, 6, 7}  # the last of the two groups


def test_a_dump_made_with_other_settings_stops_the_replay(
    recipe: Path, recorded: Path, tmp_path: Path
) -> None:
    with pytest.raises(DataError, match=r"noise_level: the dump has 0\.7, the recipe 0\.5"):
        run_here(recipe, tmp_path / "a", replayed(recorded), "sde.noise_level=0.5")
    with pytest.raises(DataError, match=r"num_steps: the dump has 4, the recipe 5"):
        run_here(recipe, tmp_path / "b", replayed(recorded), "sampling.num_steps=5")


def test_before_the_first_step_engine_and_trainer_agree_to_the_bit(recorded: Path) -> None:
    first, second = iterations(recorded / "run")
    assert [first[name] for name in (*PROBE, "train/model_output_rel_max")] == [0.0] * 3
    # the engine's weights are merged adapters now, the trainer's are not
    assert 0 < second["train/model_output_max_abs_diff"] < 1e-5
    assert second["train/model_output_mean_abs_diff"] <= second["train/model_output_max_abs_diff"]


def test_an_engine_is_asked_for_its_tensors_in_training_only(recorded: Path) -> None:
    evaluation = read_dump(recorded / "dump/rollout_data/eval_0.safetensors", "evaluation")
    assert all(sample.trajectory is None for sample in evaluation["sets"]["heldout"])
    rollout = read_dump(recorded / "dump/rollout_data/0.safetensors", "rollout")
    names = {name for g in rollout["groups"] for s in g.samples for name in s.trajectory.debug}
    assert names == {"model_outputs", "prev_sample_means", "noise_std_devs", "variance_noises"}


@pytest.mark.slow
def test_two_ranks_train_in_the_environment_of_the_recipe_and_replay_a_dump(
    recipe: Path, recorded: Path, tmp_path: Path
) -> None:
    words = set_words(
        [
            replayed(recorded),
            "cluster.actor_num_gpus_per_node=2",
            'train.env={ACME_MODE="quick"}',
            f"debug.save_train_data={tmp_path}/{{rollout_id}}_{{rank}}",
        ]
    )
    process = start_run(recipe, tmp_path / "run", *words)
    given: list[str] = []
    while process.poll() is None:
        given += environments_of_children(process.pid)
        time.sleep(0.1)
    printed, _ = process.communicate()
    assert process.returncode == 0, printed
    assert any("ACME_MODE=quick" in text for text in given)
    assert files_below(tmp_path) >= {"0_0", "0_1", "1_0", "1_1"}
    right, found = trained_weights(recorded / "run", 2), trained_weights(tmp_path / "run", 2)
    for name, tensor in right.items():
        torch.testing.assert_close(found[name], tensor, rtol=1e-3, atol=1e-4)

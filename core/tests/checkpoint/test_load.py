"""Where a run starts: what ``checkpoint.load`` may name, and every way in which it cannot be used."""

from __future__ import annotations

import json
from types import SimpleNamespace

import pytest
from state_parts import saved, step, two_parts

from drl.checkpoint.folders import TRACKER, folder_name, write_tracker
from drl.checkpoint.listing import bytes_text, lines_of, list_checkpoints
from drl.checkpoint.load import (
    check_loadable,
    checkpoints_of,
    find_checkpoint,
    load_options,
    newest,
)
from drl.checkpoint.manifest import write_manifest
from drl.checkpoint.retention import write_score
from drl.errors import CheckpointError


@pytest.fixture(scope="module")
def state(tmp_path_factory):
    parts = two_parts()
    step(parts)
    return saved(tmp_path_factory.mktemp("state") / "x", parts)


@pytest.fixture
def run_dir(tmp_path, state):
    """A run directory with the checkpoints 2 and 4."""
    import shutil

    run = tmp_path / "run"
    for number in (2, 4):
        folder = run / "checkpoints" / folder_name(number)
        shutil.copytree(state, folder)
        write_manifest(folder)
        write_tracker(run / "checkpoints", number)
    (run / "recipe.toml").write_text('[run]\nname = "a"\n')
    return run


def problem(path, step=None):
    with pytest.raises(CheckpointError) as caught:
        find_checkpoint(path, step)
    return str(caught.value)


def test_a_run_its_folder_and_one_checkpoint_lead_to_the_same_place(run_dir):
    root = run_dir / "checkpoints"
    for path in (run_dir, root, root / "iter_0000004"):
        assert find_checkpoint(path) == root / "iter_0000004"


def test_a_step_overrides_the_tracker(run_dir):
    root = run_dir / "checkpoints"
    for path in (run_dir, root, root / "iter_0000002"):
        assert find_checkpoint(path, 2) == root / "iter_0000002"


def test_the_tracker_may_name_an_older_one(run_dir):
    write_tracker(run_dir / "checkpoints", 2)
    assert find_checkpoint(run_dir).name == "iter_0000002"


def test_a_step_that_is_not_there_is_an_error_that_lists_what_is(run_dir):
    text = problem(run_dir, 3)
    assert "checkpoint.step = 3" in text
    assert text.endswith("has no iter_0000003; it has 2, 4")


def test_a_step_and_a_folder_that_contradict_each_other(run_dir):
    text = problem(run_dir / "checkpoints" / "iter_0000002", 4)
    assert "checkpoint.step = 4, but checkpoint.load names iter_0000002" in text


def test_a_missing_path_and_an_empty_one(tmp_path):
    assert "there is no folder" in problem(tmp_path / "nowhere")
    (tmp_path / "empty").mkdir()
    assert "has no checkpoints" in problem(tmp_path / "empty")


@pytest.mark.parametrize("step", [None, 4])
def test_a_damaged_one_is_named_and_the_good_one_offered(run_dir, step):
    (run_dir / "checkpoints" / "iter_0000004" / "meta.json").write_text("{}")
    text = problem(run_dir, step)
    assert "iter_0000004 cannot be used: meta.json differs from its checksum" in text
    assert "iter_0000002 is good" in text


def test_a_run_may_keep_its_checkpoints_elsewhere(run_dir, tmp_path):
    elsewhere = tmp_path / "elsewhere"
    (run_dir / "checkpoints").rename(elsewhere)
    (run_dir / "recipe.toml").write_text(f'[checkpoint]\nsave = "{elsewhere}"\n')
    assert checkpoints_of(run_dir) == elsewhere
    assert find_checkpoint(run_dir) == elsewhere / "iter_0000004"
    (run_dir / "recipe.toml").write_text("[checkpoint\n")
    assert "recipe.toml cannot be read" in problem(run_dir)


def test_the_newest_of_a_run_that_was_killed_before_its_tracker(run_dir):
    root = run_dir / "checkpoints"
    (root / TRACKER).unlink()
    assert newest(root) == root / "iter_0000004"
    assert newest(run_dir / "nowhere") is None
    (root / "iter_0000004" / "run.json").write_text("foreign")
    with pytest.raises(CheckpointError, match=r"run\.json does not belong to it"):
        newest(root)


def recipe(checkpoint="org/m", rollouts=10, first=None, **options):
    values = {
        "load_optim": True,
        "load_rng": True,
        "use_checkpoint_lr_scheduler": True,
        "override_lr_scheduler": False,
    } | options
    section = SimpleNamespace(**values)
    return SimpleNamespace(
        model=SimpleNamespace(checkpoint=checkpoint, components=("transformer",)),
        train=SimpleNamespace(num_rollout=rollouts, start_rollout_id=first),
        checkpoint=section,
        optimizer=section,
    )


def test_a_run_that_would_end_before_it_starts_is_refused(run_dir):
    folder = find_checkpoint(run_dir)
    check_loadable(folder, recipe(rollouts=5))
    for rollouts in (4, 3):
        with pytest.raises(CheckpointError, match=f"train.num_rollout = {rollouts} ends there"):
            check_loadable(folder, recipe(rollouts=rollouts))
    check_loadable(folder, recipe(rollouts=3, first=1))  # which starts there, not at the checkpoint
    check_loadable(folder, recipe(rollouts=0))  # which evaluates it


def test_another_base_is_refused_for_parts_of_a_model(run_dir):
    folder = find_checkpoint(run_dir)
    meta = json.loads((folder / "meta.json").read_text())
    base = {"checkpoint": "org/m", "components": {}}
    (folder / "meta.json").write_text(json.dumps(meta | {"base": base, "all_parameters": 999}))
    check_loadable(folder, recipe("org/m"))
    with pytest.raises(CheckpointError, match="trained on the base model org/m"):
        check_loadable(folder, recipe("org/other"))


@pytest.mark.parametrize(
    ("options", "loads", "schedule"),
    [
        ({}, True, "checkpoint"),
        ({"override_lr_scheduler": True}, True, "recipe"),
        ({"use_checkpoint_lr_scheduler": False}, True, "equal"),
        ({}, False, "recipe"),
        ({"use_checkpoint_lr_scheduler": False}, False, "recipe"),
    ],
)
def test_whose_schedule_is_taken(options, loads, schedule):
    assert load_options(recipe(**options), loads=loads, trust=False).schedule == schedule


def test_what_is_taken_follows_the_recipe():
    options = load_options(recipe(load_optim=False, load_rng=False), loads=True, trust=True)
    assert (options.optimizer, options.rng, options.trust) == (False, False, True)


def test_the_list_tells_good_from_damaged_and_why_each_stays(run_dir):
    root = run_dir / "checkpoints"
    (run_dir / "recipe.toml").write_text(
        '[checkpoint]\nkeep_last = 1\nkeep_best = 1\nbest_metric = "eval/a"\n'
    )
    write_score(root, 2, 0.25)
    (root / "iter_0000004" / "meta.json").write_text("{}")
    first, last = list_checkpoints(run_dir)
    assert (first.iterations, first.problem, first.score, first.why) == (2, None, 0.25, ("best 1",))
    assert first.time.endswith("Z")
    assert first.size > 1000
    assert (last.problem, last.time) == ("meta.json differs from its checksum", None)
    assert last.is_tracked
    assert not first.is_tracked
    assert last.why == ("newest",)
    assert list_checkpoints(root) == [first, last]


def test_the_table_for_people(run_dir):
    (run_dir / "checkpoints" / "kept.txt").write_text("iter_0000002  a fine one\n")
    head, first, last = lines_of(list_checkpoints(run_dir))
    assert head.split() == ["checkpoint", "size", "saved", "(UTC)", "score", "state", "stays", "as"]
    assert first.startswith("iter_0000002  ")
    assert first.endswith("good   recent, kept: a fine one")
    assert last.startswith("iter_0000004 *")


@pytest.mark.parametrize(
    ("size", "text"),
    [(0, "0 B"), (999, "999 B"), (1500, "1.5 kB"), (27e9, "27 GB"), (5e15, "5e+03 TB")],
)
def test_sizes_have_three_digits(size, text):
    assert bytes_text(size) == text


def test_a_folder_that_is_not_there(tmp_path):
    with pytest.raises(CheckpointError, match="there is no folder"):
        list_checkpoints(tmp_path / "nowhere")

"""A save from its beginning to a folder that counts: in order, beside training, whole or absent."""

from __future__ import annotations

import json
import os
import threading
from concurrent.futures import Future

import pytest
import torch
from state_parts import keeper, same, step, two_parts, weights
from torch import nn

from drl.checkpoint import damage, latest, read_meta, read_weights
from drl.checkpoint import saver as module
from drl.checkpoint.folders import TRACKER, checkpoints_in, folder_name
from drl.checkpoint.retention import Retention
from drl.checkpoint.saver import Save, Saver
from drl.errors import CheckpointError, DrlError
from drl.lora import LoraConfig, adapter_snapshot, inject


def save_of(root, number, **changes):
    values = {
        "final": root / folder_name(number),
        "state": json.dumps({"next_rollout_id": number}),
        "base": lambda: {"checkpoint": "org/m", "components": {}},
        "adapters": {},
        "adapter_folder": root.parent / "adapter",
        "base_model": "org/m",
        "retention": Retention(),
    }
    return Save(**(values | changes))


def write(save, parts):
    """Let a keeper write its part at once."""
    save.open()
    keeper().save(save.beside, parts)
    done = Future()
    done.set_result(None)
    return done


def finished(root, number, parts, **changes):
    """Save and wait."""
    saver, save = Saver(), save_of(root, number, **changes)
    saver.begin(save, write(save, parts))
    return saver.take(wait=True)


@pytest.fixture
def parts():
    made = two_parts()
    step(made)
    return made


def test_a_finished_save_is_whole_tracked_and_says_what_it_needs(tmp_path, parts):
    root = tmp_path / "checkpoints"
    result = finished(root, 3, parts)
    assert result.final == root / "iter_0000003"
    assert result.seconds > 0
    assert damage(result.final) is None
    assert latest(root) == result.final
    assert same(read_weights(result.final), weights(parts))
    assert json.loads((result.final / "run.json").read_text()) == {"next_rollout_id": 3}
    assert read_meta(result.final)["base"] == {"checkpoint": "org/m", "components": {}}
    assert sorted(path.name for path in root.iterdir()) == ["iter_0000003", TRACKER]


def test_the_folder_appears_before_the_tracker_and_both_after_the_manifest(
    tmp_path, parts, monkeypatch
):
    root, seen = tmp_path / "checkpoints", []
    manifest, replace, tracker = module.write_manifest, module.replace_folder, module.write_tracker

    def spy(name, real):
        def called(*arguments):
            tracked = (root / TRACKER).exists()
            seen.append((name, sorted(checkpoints_in(root)), tracked))
            real(*arguments)

        return called

    monkeypatch.setattr(module, "write_manifest", spy("manifest", manifest))
    monkeypatch.setattr(module, "replace_folder", spy("rename", replace))
    monkeypatch.setattr(module, "write_tracker", spy("tracker", tracker))
    finished(root, 1, parts)
    assert seen == [("manifest", [], False), ("rename", [], False), ("tracker", [1], False)]


def test_taking_does_not_wait_unless_asked(tmp_path, parts):
    saver, save = Saver(), save_of(tmp_path / "c", 1)
    written: Future[None] = Future()
    save.open()
    keeper().save(save.beside, parts)
    saver.begin(save, written)
    assert saver.current == save.final
    assert saver.take(wait=False) is None
    assert not save.final.exists()
    threading.Timer(0.05, written.set_result, [None]).start()
    assert saver.take(wait=True).final == save.final
    assert saver.current is None
    assert saver.take(wait=True) is None


def test_what_went_wrong_is_raised_once_and_leaves_the_one_before(tmp_path, parts):
    root = tmp_path / "c"
    finished(root, 1, parts)
    saver, save = Saver(), save_of(root, 2)
    save.open()
    failed: Future[None] = Future()
    failed.set_exception(OSError(28, "No space left on device"))
    saver.begin(save, failed)
    with pytest.raises(OSError, match="No space left"):
        saver.take(wait=True)
    assert saver.take(wait=True) is None
    assert latest(root) == root / "iter_0000001"
    assert sorted(path.name for path in root.iterdir()) == ["iter_0000001", TRACKER]


def test_an_adapter_that_cannot_be_written_costs_no_checkpoint(tmp_path, parts):
    model = nn.Sequential(nn.Linear(3, 2))
    config = LoraConfig(rank=1, alpha=1, target_modules=("0",))
    inject(model, config, generator=torch.Generator().manual_seed(0))
    adapters = {"transformer": adapter_snapshot(model, config)}
    (tmp_path / "adapter").mkdir()
    (tmp_path / "adapter" / "notes.txt").write_text("somebody's own")
    root = tmp_path / "checkpoints"
    with pytest.raises(DrlError, match=r"checkpoint iter_0000004 is in place, but not the adapter"):
        finished(root, 4, parts, adapters=adapters)
    assert damage(root / "iter_0000004") is None
    assert latest(root) == root / "iter_0000004"
    assert (tmp_path / "adapter" / "notes.txt").read_text() == "somebody's own"


def test_a_state_that_cannot_be_completed_never_gets_its_name(tmp_path, parts):
    root = tmp_path / "c"

    def fail():
        raise OSError("base model is gone")

    with pytest.raises(OSError, match="base model is gone"):
        finished(root, 1, parts, base=fail)
    assert list(root.iterdir()) == []


def test_a_trainer_that_wrote_no_meta_is_an_error(tmp_path):
    saver, save = Saver(), save_of(tmp_path / "c", 1)
    save.open()
    done: Future[None] = Future()
    done.set_result(None)
    saver.begin(save, done)
    with pytest.raises(CheckpointError, match="no checkpoint of drl"):
        saver.take(wait=True)


def test_the_same_iteration_again_replaces_its_checkpoint(tmp_path, parts):
    root = tmp_path / "c"
    finished(root, 1, parts)
    step(parts, seed=5)
    finished(root, 1, parts)
    assert same(read_weights(root / "iter_0000001"), weights(parts))
    assert sorted(path.name for path in root.iterdir()) == ["iter_0000001", TRACKER]


def test_retention_runs_after_the_tracker_and_says_what_it_deleted(tmp_path, parts):
    root, keep = tmp_path / "c", Retention(last=2)
    results = [finished(root, number, parts, retention=keep) for number in (1, 2, 3, 4)]
    assert [result.removed for result in results] == [
        (),
        (),
        ("iter_0000001",),
        ("iter_0000002",),
    ]
    assert list(checkpoints_in(root)) == [3, 4]


def test_deletion_that_fails_leaves_the_new_checkpoint_in_place(tmp_path, parts, monkeypatch):
    root = tmp_path / "c"
    finished(root, 1, parts)

    def refuse(folder):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr("drl.checkpoint.retention.remove_folder", refuse)
    with pytest.raises(PermissionError):
        finished(root, 2, parts, retention=Retention(last=1))
    assert latest(root) == root / "iter_0000002"


def test_opening_clears_what_a_killed_writer_left(tmp_path):
    save = save_of(tmp_path / "c", 2)
    (tmp_path / "c" / ".writing-iter_0000001-77" / "model").mkdir(parents=True)
    save.open()
    assert [path.name for path in (tmp_path / "c").iterdir()] == [
        f".writing-iter_0000002-{os.getpid()}"
    ]
    save.drop()
    assert list((tmp_path / "c").iterdir()) == []


def test_an_interrupt_while_waiting_leaves_the_save_under_way(tmp_path, parts, monkeypatch):
    saver, save = Saver(), save_of(tmp_path / "c", 1)
    written: Future[None] = Future()
    save.open()
    keeper().save(save.beside, parts)
    saver.begin(save, written)

    def interrupt(self, timeout=None):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(Future, "exception", interrupt)
        with pytest.raises(KeyboardInterrupt):
            saver.take(wait=True)
    assert saver.current == save.final
    written.set_result(None)
    assert saver.take(wait=True).final == save.final

"""One rank's state, saved and restored: what comes back, what is refused, what changes nothing."""

from __future__ import annotations

import json
import threading
from dataclasses import replace

import pytest
import torch
from state_parts import (
    SCHEDULE,
    before_and_after,
    keeper,
    moments,
    parts_of,
    same,
    saved,
    step,
    two_parts,
    weights,
    with_ema,
)
from torch import nn

from drl.checkpoint import keeper as keepers
from drl.checkpoint import read_meta, read_weights
from drl.checkpoint.dcp import read_whole
from drl.checkpoint.keeper import in_background
from drl.checkpoint.state import RestoreOptions
from drl.errors import CheckpointError
from drl.mathematics.schedule import ScheduleSettings
from drl.model.scaler import LossScaler


def test_weights_and_moments_come_back_bit_for_bit_and_the_next_step_is_equal(tmp_path):
    one, other = two_parts(), two_parts(seed=9)
    for seed in range(3):
        step(one, seed=seed)
    keeper().restore(saved(tmp_path / "x", one), other)
    assert same(weights(one), weights(other))
    assert same(moments(one), moments(other))
    for parts in (one, other):
        step(parts, seed=5)
    assert same(weights(one), weights(other))


def test_the_layout_is_the_documented_one(tmp_path):
    parts = with_ema(replace(two_parts(), scaler=LossScaler(enabled=True)))
    step(parts)
    folder = saved(tmp_path / "x", parts)
    assert sorted(path.name for path in folder.iterdir()) == [
        "ema",
        "lr_scheduler.json",
        "meta.json",
        "model",
        "optimizer",
        "rng",
        "scaler.json",
    ]
    assert [path.name for path in (folder / "rng").iterdir()] == ["rank_00000.safetensors"]
    assert read_whole(folder / "model").keys() == parts.parameters.keys()
    assert read_whole(folder / "optimizer").keys() == moments(parts).keys()
    assert json.loads((folder / "lr_scheduler.json").read_text())["lr"] == 0.1
    assert json.loads((folder / "scaler.json").read_text())["scale"] == 65536.0


def test_the_meta_says_where_and_what(tmp_path):
    parts = with_ema(two_parts())
    step(parts)
    meta = read_meta(saved(tmp_path / "x", parts))
    assert {k: meta[k] for k in parts.position} == dict(parts.position)
    assert meta["world_size"] == 1
    assert meta["optimizer"] == "saved"
    assert meta["ema"]["count"] == 1
    assert meta["trained_parameters"] == meta["all_parameters"] == 4 * 3 + 3 + 3 * 2 + 2
    assert meta["versions"]["torch"] == torch.__version__
    assert meta["time"].endswith("Z")


def test_frozen_parameters_are_counted_and_not_saved(tmp_path):
    model = nn.Linear(4, 3)
    model.weight.requires_grad_(False)
    parts = parts_of({"transformer": model})
    parts = replace(parts, parameters={"transformer.bias": model.bias})
    parts = replace(parts, optimizer=torch.optim.AdamW([model.bias], lr=0.1))
    folder = saved(tmp_path / "x", parts)
    assert list(read_weights(folder)) == ["transformer.bias"]
    assert read_meta(folder)["trained_parameters"] == 3
    assert read_meta(folder)["all_parameters"] == 15


def test_a_copy_is_saved_whatever_training_does_meanwhile(tmp_path, monkeypatch):
    parts = with_ema(two_parts())
    step(parts)
    before, shadow = weights(parts), {k: v.clone() for k, v in parts.ema.state().items()}
    begun, go_on = threading.Event(), threading.Event()
    write = keepers.Writer.write

    def slow(self, folder, tensors):
        begun.set()
        assert go_on.wait(10)
        write(self, folder, tensors)

    monkeypatch.setattr(keepers.Writer, "write", slow)
    (tmp_path / "x").mkdir()
    future = keeper().begin_save(tmp_path / "x", parts)
    assert begun.wait(10)
    assert not future.done()
    for seed in range(1, 4):
        step(parts, seed=seed)
    go_on.set()
    future.result(10)
    assert same(read_weights(tmp_path / "x"), before)
    assert same(read_whole(tmp_path / "x" / "ema"), shadow)
    assert float(read_whole(tmp_path / "x" / "optimizer")["transformer.weight/step"]) == 1.0
    assert not same(weights(parts), before)


def test_the_next_save_waits_for_the_one_before(tmp_path):
    parts = two_parts()
    step(parts)
    made = keeper()
    futures = []
    for number in range(3):
        (tmp_path / str(number)).mkdir()
        if futures:
            futures[-1].add_done_callback(lambda _: None)
        futures.append(made.begin_save(tmp_path / str(number), parts))
        assert all(future.done() for future in futures[:-1])
    futures[-1].result(10)


def test_a_save_that_failed_does_not_stand_in_the_way_of_the_next(tmp_path):
    parts = two_parts()
    step(parts)
    made = keeper()
    future = made.begin_save(tmp_path / "missing" / "folder" / "x", parts)
    with pytest.raises(OSError, match="missing"):
        future.result(10)
    (tmp_path / "x").mkdir()
    made.begin_save(tmp_path / "x", parts).result(10)
    assert same(read_weights(tmp_path / "x"), weights(parts))


def test_a_background_error_of_any_kind_reaches_who_waits():
    def fail():
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        in_background(fail).result(10)


class Wider(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(5, 4))
        self.extra = nn.Parameter(torch.zeros(2))


def test_another_model_is_refused_before_anything_changes(tmp_path):
    one = two_parts()
    step(one)
    other = parts_of({"transformer": Wider(), "transformer_2": nn.Linear(3, 2)})
    text = before_and_after(saved(tmp_path / "x", one), other)
    assert "1 missing ['transformer.extra']" in text
    assert "1 unexpected ['transformer.bias']" in text
    assert "1 of another shape ['transformer.weight: (3, 4), the model has (5, 4)']" in text


def test_damage_found_late_still_changes_nothing(tmp_path):
    """The optimizer's part is unreadable; the model's part, read first, must not be in place."""
    one, other = two_parts(), two_parts(seed=9)
    step(one)
    folder = saved(tmp_path / "x", one)
    (folder / "optimizer" / ".metadata").write_bytes(b"\x80\x04N.")
    assert "refused" in before_and_after(folder, other)


@pytest.mark.parametrize("harm", ["gone", "text", "list", "no_number"])
def test_a_folder_without_usable_meta_is_named(tmp_path, harm):
    one, other = two_parts(), two_parts(seed=9)
    folder = saved(tmp_path / "x", one)
    file = folder / "meta.json"
    if harm == "gone":
        file.unlink()
    elif harm == "no_number":
        file.write_text(json.dumps(json.loads(file.read_text()) | {"global_step": "7"}))
    else:
        file.write_text("{" if harm == "text" else "[1]")
    assert "meta.json" in before_and_after(folder, other)


def test_the_ema_comes_back_with_its_count_and_goes_on_equally(tmp_path):
    one, other = with_ema(two_parts()), with_ema(two_parts(seed=9))
    for seed in range(3):
        step(one, seed=seed)
    found = keeper().restore(saved(tmp_path / "x", one), other)
    assert found.remarks == ()
    assert other.ema.count == 3
    assert same(one.ema.state(), other.ema.state())
    for parts in (one, other):
        step(parts, seed=5)
    assert same(one.ema.state(), other.ema.state())


def test_the_decay_of_the_checkpoint_holds_and_is_said(tmp_path):
    one, other = with_ema(two_parts(), decay_max=0.5), with_ema(two_parts(), decay_max=0.9)
    step(one)
    found = keeper().restore(saved(tmp_path / "x", one), other)
    assert other.ema.settings.decay_max == 0.5
    assert any("ema.decay_max" in line for line in found.remarks)


def test_a_checkpoint_without_an_ema_seeds_it_from_its_weights(tmp_path):
    one, other = two_parts(), with_ema(two_parts(seed=9))
    step(one)
    found = keeper().restore(saved(tmp_path / "x", one), other)
    assert same(other.ema.state(), weights(one))
    assert other.ema.count == 0
    assert "it starts as a copy of the loaded weights" in found.remarks[0]


def test_an_ema_that_the_recipe_does_not_want_is_left_alone(tmp_path):
    one, other = with_ema(two_parts()), two_parts(seed=9)
    step(one)
    assert keeper().restore(saved(tmp_path / "x", one), other).remarks == ()


def test_the_scaler_goes_on_where_it_was(tmp_path):
    one, other = (replace(two_parts(), scaler=LossScaler(enabled=True)) for _ in range(2))
    one.scaler.settle("non-finite gradient in a")
    for _ in range(3):
        one.scaler.settle(None)
    keeper().restore(saved(tmp_path / "x", one), other)
    assert other.scaler.state() == one.scaler.state()
    assert other.scaler.scale == 32768.0


OTHER = ScheduleSettings(lr=0.01, decay_iters=100, style="linear")


@pytest.mark.parametrize(("choice", "holds"), [("recipe", OTHER), ("checkpoint", SCHEDULE)])
def test_whose_schedule_holds(tmp_path, choice, holds):
    one, other = two_parts(), replace(two_parts(), schedule=OTHER)
    folder = saved(tmp_path / "x", one)
    found = keeper().restore(folder, other, RestoreOptions(schedule=choice))
    assert found.schedule == holds
    lines = "\n".join(found.remarks)
    assert ("lr is 0.1 in the checkpoint, 0.01 in the recipe; the checkpoint's holds" in lines) == (
        choice == "checkpoint"
    )


def test_equal_schedules_or_an_error_that_says_what_to_set(tmp_path):
    one, other = two_parts(), replace(two_parts(seed=9), schedule=OTHER)
    folder = saved(tmp_path / "x", one)
    text = before_and_after(folder, other, RestoreOptions(schedule="equal"))
    assert "style is 'constant' in the checkpoint, 'linear' in the recipe" in text
    assert "optimizer.override_lr_scheduler = true for the recipe's" in text
    found = keeper().restore(folder, two_parts(), RestoreOptions(schedule="equal"))
    assert found.schedule == SCHEDULE


@pytest.mark.parametrize("text", ["{", '{"lr": 0.1}', '{"lr": 1, "decay_iters": 0}', "[]"])
def test_a_schedule_that_is_none_is_named(tmp_path, text):
    folder = saved(tmp_path / "x", two_parts())
    (folder / "lr_scheduler.json").write_text(text)
    options = RestoreOptions(schedule="checkpoint")
    assert "lr_scheduler.json" in before_and_after(folder, two_parts(seed=9), options)


def test_random_numbers_go_on_where_they_were(tmp_path):
    one, other = keeper(seed=1), keeper(seed=2)
    with one.randomness.in_place():
        torch.rand(5)
    (tmp_path / "x").mkdir()
    one.save(tmp_path / "x", two_parts())
    other.restore(tmp_path / "x", two_parts())
    with one.randomness.in_place():
        first = torch.rand(3)
    with other.randomness.in_place():
        assert torch.equal(torch.rand(3), first)


def test_without_them_the_run_draws_its_own(tmp_path):
    one, other, alike = keeper(seed=1), keeper(seed=2), keeper(seed=2)
    (tmp_path / "x").mkdir()
    one.save(tmp_path / "x", two_parts())
    other.restore(tmp_path / "x", two_parts(), RestoreOptions(rng=False))
    with alike.randomness.in_place():
        wanted = torch.rand(3)
    with other.randomness.in_place():
        assert torch.equal(torch.rand(3), wanted)


def test_weights_of_a_folder_that_is_no_checkpoint(tmp_path):
    with pytest.raises(CheckpointError, match=r"is no checkpoint of drl: it has no meta\.json"):
        read_weights(tmp_path)

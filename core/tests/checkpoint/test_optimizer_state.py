"""Optimizer state by parameter name: complete, declared to be missing, or an error that names it."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from state_parts import (
    before_and_after,
    keeper,
    parts_of,
    same,
    saved,
    step,
    two_parts,
    weights,
)
from torch import nn

from drl.checkpoint import read_meta
from drl.checkpoint.dcp import read_whole
from drl.checkpoint.keeper import SaveSettings
from drl.checkpoint.state import RestoreOptions
from drl.errors import CheckpointError


def test_an_optimizer_that_never_stepped_has_nothing_to_save(tmp_path):
    one, other = two_parts(), two_parts(seed=9)
    folder = saved(tmp_path / "x", one)
    assert not (folder / "optimizer").exists()
    assert read_meta(folder)["optimizer"] == "without state"
    keeper().restore(folder, other)
    assert same(weights(one), weights(other))
    assert not other.optimizer.state


def test_a_component_that_was_never_stepped_has_no_state(tmp_path):
    one, other = two_parts(), two_parts(seed=9)
    step(one, only="transformer.")
    folder = saved(tmp_path / "x", one)
    assert {name.partition(".")[0] for name in read_whole(folder / "optimizer")} == {"transformer"}
    keeper().restore(folder, other)
    for parts in (one, other):
        step(parts, seed=4)
    assert same(weights(one), weights(other))


def test_a_parameter_that_no_gradient_reached_is_an_error_that_names_it(tmp_path):
    one = two_parts()
    step(one, only="transformer.weight")
    (tmp_path / "x").mkdir()
    with pytest.raises(CheckpointError, match=r"1 trained parameters .*: transformer\.bias\n"):
        keeper().save(tmp_path / "x", one)
    with pytest.raises(CheckpointError, match=r"transformer\.bias"):
        keeper().begin_save(tmp_path / "x", one)
    assert list((tmp_path / "x").iterdir()) == []


def test_a_family_may_declare_it(tmp_path):
    one, other = two_parts(), two_parts(seed=9)
    step(one, only="transformer.weight")
    declared = SaveSettings(may_miss={"transformer": ("bias",)})
    folder = saved(tmp_path / "x", one, declared)
    keeper(declared).restore(folder, other)
    assert same(weights(one), weights(other))
    assert other.parameters["transformer.bias"] not in other.optimizer.state
    third = two_parts(seed=8)
    assert "transformer.bias" in before_and_after(folder, third)


def test_a_declaration_is_about_one_component_alone(tmp_path):
    one = two_parts()
    step(one, only="transformer.weight")
    (tmp_path / "x").mkdir()
    with pytest.raises(CheckpointError, match=r"transformer\.bias"):
        keeper(SaveSettings(may_miss={"transformer_2": ("bias",)})).save(tmp_path / "x", one)


def test_state_of_a_parameter_that_is_not_trained_is_refused(tmp_path):
    one = two_parts()
    step(one)
    folder = saved(tmp_path / "x", one)
    other = parts_of({"transformer": nn.Linear(4, 3)})
    assert "unexpected ['transformer_2.bias'" in before_and_after(folder, other)


def test_without_the_optimizer_it_starts_anew(tmp_path):
    one, other = two_parts(), two_parts(seed=9)
    step(one)
    keeper().restore(saved(tmp_path / "x", one), other, RestoreOptions(optimizer=False))
    assert same(weights(one), weights(other))
    assert not other.optimizer.state


def test_a_checkpoint_saved_without_it_says_how_to_go_on(tmp_path):
    one, other = two_parts(), two_parts(seed=9)
    step(one)
    folder = saved(tmp_path / "x", one, SaveSettings(optimizer=False))
    assert not (folder / "optimizer").exists()
    assert "set checkpoint.load_optim = false" in before_and_after(folder, other)
    keeper().restore(folder, other, RestoreOptions(optimizer=False))
    assert same(weights(one), weights(other))


def test_settings_of_the_optimizer_stay_those_of_the_recipe(tmp_path):
    one, other = two_parts(), two_parts(seed=9)
    step(one)
    other.optimizer.param_groups[0]["weight_decay"] = 0.5
    keeper().restore(saved(tmp_path / "x", one), other)
    assert other.optimizer.param_groups[0]["weight_decay"] == 0.5


def test_momentum_of_sgd_comes_back(tmp_path):
    pairs = [two_parts(), two_parts(seed=9)]
    one, other = (
        replace(p, optimizer=torch.optim.SGD(p.parameters.values(), lr=0.1, momentum=0.9))
        for p in pairs
    )
    for seed in range(2):
        step(one, seed=seed)
    keeper().restore(saved(tmp_path / "x", one), other)
    for parts in (one, other):
        step(parts, seed=5)
    assert same(weights(one), weights(other))


def test_state_that_is_no_tensor_cannot_be_saved(tmp_path):
    one = two_parts()
    step(one)
    one.optimizer.state[one.parameters["transformer.bias"]]["history"] = [1, 2]
    (tmp_path / "x").mkdir()
    with pytest.raises(CheckpointError, match=r"'history' that AdamW keeps of transformer\.bias"):
        keeper().save(tmp_path / "x", one)

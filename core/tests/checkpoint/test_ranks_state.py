"""States of sharded and whole trainers: saved by two ranks, restored by one, and the other way round."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from gloo_ranks import spawn
from state_parts import CPU, keeper, moments, parts_of, same, saved, step, weights, with_ema
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from drl.checkpoint import read_meta, read_weights
from drl.checkpoint.dcp import read_whole
from drl.checkpoint.keeper import StateKeeper
from drl.errors import CheckpointError
from drl.model.parallel import Ranks


class Net(nn.Module):
    """5 rows over two ranks are uneven; 1 row leaves a rank without any."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(3, 5)
        self.last = nn.Linear(5, 1)


def whole_parts(seed):
    torch.manual_seed(seed)
    return with_ema(parts_of({"transformer": Net()}))


def sharded_parts(seed, mesh):
    torch.manual_seed(seed)
    model = Net()
    fully_shard(model.first, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return with_ema(parts_of({"transformer": model}))


def same_step(parts, seed):
    """Take a step with the gradient that an unsharded model would have."""
    from torch.distributed.tensor import DTensor, distribute_tensor

    generator = torch.Generator().manual_seed(seed)
    for parameter in parts.parameters.values():
        gradient = torch.randn(parameter.shape, generator=generator)
        if isinstance(parameter, DTensor):
            gradient = distribute_tensor(gradient, parameter.device_mesh, parameter.placements)
        parameter.grad = gradient
    parts.optimizer.step()
    parts.ema.update()


def ranks_of(rank, world):
    group = torch.distributed.new_group(backend="gloo")
    talk = torch.distributed.new_group(backend="gloo")
    mesh = init_device_mesh("cpu", (world,))
    return Ranks(rank=rank, world=world, mesh=mesh, save_group=group, talk=talk)


def _two_ranks(rank, world, folder):
    ranks = ranks_of(rank, world)
    made = keeper(ranks=ranks)
    parts = sharded_parts(0, ranks.mesh)
    for seed in range(2):
        same_step(parts, seed)
    with made.randomness.in_place():
        drawn = torch.rand(2)
    target = folder / "two"
    if rank == 0:
        target.mkdir()
    torch.distributed.barrier()
    made.begin_save(target, parts).result(60)
    other = sharded_parts(7, ranks.mesh)
    again = keeper(ranks=ranks, seed=99)
    found = again.restore(folder / "one", other)
    assert found.meta["world_size"] == 1
    assert any("made by 1 ranks, this run has 2" in line for line in found.remarks)
    wanted = whole_parts(0)
    for seed in range(2):
        same_step(wanted, seed)
    for name, parameter in other.parameters.items():
        assert torch.equal(parameter.full_tensor(), wanted.parameters[name]), name
        state, truth = other.optimizer.state[parameter], wanted.optimizer.state
        for kind in ("exp_avg", "exp_avg_sq"):
            whole = truth[wanted.parameters[name]][kind]
            assert torch.equal(state[kind].full_tensor(), whole), (name, kind)
    assert other.ema.count == 2
    again.restore(target, other)
    with again.randomness.in_place(), pytest.MonkeyPatch.context():
        after = torch.rand(2)
    with made.randomness.in_place():
        assert torch.equal(torch.rand(2), after)  # each rank has its own numbers back
    gathered = [torch.zeros(2) for _ in range(world)]
    torch.distributed.all_gather(gathered, drawn)
    assert not torch.equal(gathered[0], gathered[1])


def test_two_ranks_and_one_exchange_their_states(tmp_path):
    one = whole_parts(0)
    for seed in range(2):
        same_step(one, seed)
    saved(tmp_path / "one", one)
    spawn(_two_ranks, 2, tmp_path)
    folder = tmp_path / "two"
    assert same(read_weights(folder), weights(one))
    assert same(read_whole(folder / "optimizer"), moments(one))
    assert same(read_whole(folder / "ema"), one.ema.state())
    assert read_meta(folder)["world_size"] == 2
    assert read_meta(folder)["trained_parameters"] == 3 * 5 + 5 + 5 + 1
    names = sorted(path.name for path in (folder / "rng").iterdir())
    assert names == ["rank_00000.safetensors", "rank_00001.safetensors"]
    other = whole_parts(7)
    found = keeper().restore(folder, other)
    assert same(weights(other), weights(one))
    assert same(moments(other), moments(one))
    assert any("made by 2 ranks, this run has 1" in line for line in found.remarks)


def _adapters_whole(rank, world, folder):
    """A sharded frozen base with trained parameters that every rank holds whole."""
    ranks = ranks_of(rank, world)
    torch.manual_seed(0)
    parts = parts_of({"transformer": nn.Linear(4, 3)})
    step(parts)
    if rank == 0:
        (folder / "whole").mkdir()
    torch.distributed.barrier()
    keeper(ranks=ranks).save(folder / "whole", parts)


def test_what_every_rank_holds_whole_is_written_once(tmp_path):
    spawn(_adapters_whole, 2, tmp_path)
    torch.manual_seed(0)
    parts = parts_of({"transformer": nn.Linear(4, 3)})
    step(parts)
    assert same(read_weights(tmp_path / "whole"), weights(parts))
    size = sum(file.stat().st_size for file in (tmp_path / "whole" / "model").glob("*.distcp"))
    alone = saved(tmp_path / "alone", parts)
    assert size == sum(file.stat().st_size for file in (alone / "model").glob("*.distcp"))


def _one_cannot_read(rank, world, folder):
    ranks = ranks_of(rank, world)
    parts = parts_of({"transformer": nn.Linear(4, 3)})
    before = weights(parts)
    path = folder / ("good" if rank == 0 else "gone")
    with pytest.raises(CheckpointError, match=r"gone is no checkpoint of drl"):
        keeper(ranks=ranks).restore(path, parts)
    assert same(weights(parts), before)


def test_what_one_rank_finds_wrong_stops_all_before_anything_changed(tmp_path):
    saved(tmp_path / "good", parts_of({"transformer": nn.Linear(4, 3)}))
    spawn(_one_cannot_read, 2, tmp_path)


def _one_cannot_write(rank, world, folder):
    ranks = ranks_of(rank, world)
    parts = parts_of({"transformer": nn.Linear(4, 3)})
    step(parts)
    target = folder / "x"
    if rank == 0:
        target.mkdir()
        (target / "rng").write_text("in the way")
    torch.distributed.barrier()
    future = keeper(ranks=ranks).begin_save(target, parts)
    with pytest.raises(OSError, match=r"rank \d: .*rng"):
        future.result(60)


def test_what_one_rank_cannot_write_ends_the_save_of_all(tmp_path):
    spawn(_one_cannot_write, 2, tmp_path)
    assert not (tmp_path / "x" / "model").exists()


def test_a_keeper_of_a_rank_draws_numbers_of_its_own():
    made = [
        StateKeeper(
            seed=1, device=CPU, settings=keeper().settings, ranks=replace(Ranks(), rank=rank)
        )
        for rank in (0, 1)
    ]
    drawn = []
    for one in made:
        with one.randomness.in_place():
            drawn.append(torch.rand(2))
    assert not torch.equal(*drawn)

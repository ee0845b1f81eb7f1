"""Copies that training goes on beside. The GPU's side is measured in benchmarks and tests/gpu."""

from __future__ import annotations

import pytest
import torch

from drl.checkpoint.shards import shard_of
from drl.checkpoint.staging import Staging, changed, clone, device_of, on_meta, size_of

needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


def state():
    tensors = {"a": torch.randn(3, 4), "t": torch.randn(4, 3).t(), "s": torch.tensor(1.0)}
    return {
        "model": {name: shard_of(tensor) for name, tensor in tensors.items()},
        "optimizer": {"a/step": shard_of(torch.tensor(2.0))},
    }


def test_a_copy_on_the_cpu_shares_nothing_with_the_original():
    live = state()
    before = {name: shard.local.clone() for name, shard in live["model"].items()}
    staged = Staging().copy(live).complete()
    for shard in live["model"].values():
        shard.local.zero_()
    for name, shard in staged["model"].items():
        assert torch.equal(shard.local, before[name])
        assert shard.local.is_contiguous()
        assert shard.shape == live["model"][name].shape


def test_sizes_are_bytes_and_the_cpu_is_no_device_to_wait_for():
    assert size_of(state()) == (12 + 12 + 1 + 1) * 4
    assert device_of(state()) is None
    assert device_of({}) is None


def test_shape_and_dtype_alone():
    like = on_meta(torch.zeros(2, 3, dtype=torch.bfloat16))
    assert (like.shape, like.dtype, like.is_meta) == ((2, 3), torch.bfloat16, True)


def test_nothing_is_prepared_without_a_gpu():
    staging = Staging()
    staging.prepare(state())
    assert staging._making is None
    assert staging._pinned == {}


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("room", [True, False])
def test_a_copy_of_a_gpu_is_what_was_there(monkeypatch, room):
    monkeypatch.setattr("drl.checkpoint.staging.has_room", lambda *_: room)
    live = changed(state(), torch.Tensor.cuda)
    before = {name: shard.local.cpu() for name, shard in live["model"].items()}
    staging = Staging()
    staging.prepare(live)
    for _ in range(2):
        staged = staging.copy(live)
        for shard in live["model"].values():
            shard.local.add_(1)
        for name, shard in staged.complete()["model"].items():
            assert torch.equal(shard.local.cpu(), before[name])
            assert shard.local.is_cuda == room
            before[name] = live["model"][name].local.cpu()
    assert bool(staging._pinned) != room


@pytest.mark.gpu
@needs_gpu
def test_shards_of_a_gpu_are_written_as_they_are(tmp_path):
    from drl.checkpoint import dcp

    live = changed(state(), torch.Tensor.cuda)
    dcp.write_tensors(live["model"], tmp_path / "x")
    found = dcp.read_whole(tmp_path / "x")
    assert all(torch.equal(found[n], s.local.cpu()) for n, s in live["model"].items())
    assert clone(live["model"]["t"].local).is_contiguous()

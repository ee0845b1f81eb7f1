"""Adapters sharded by FSDP2: same start values, whole states, whole merges (two CPU ranks)."""

from __future__ import annotations

import os
import socket
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn

from drl.lora import (
    LoraConfig,
    adapter_off,
    adapter_state,
    inject,
    load_adapter_state,
    merged_state,
    reset_adapters,
)

CONFIG = LoraConfig(rank=3, alpha=6, target_modules=("first", "last"))


def make_model() -> nn.ModuleDict:
    torch.manual_seed(0)
    names = {"first": nn.Linear(7, 5), "middle": nn.Linear(5, 5), "last": nn.Linear(5, 3)}
    return nn.ModuleDict(names)


def forward(model: nn.ModuleDict, x: torch.Tensor) -> torch.Tensor:
    return model["last"](torch.tanh(model["middle"](model["first"](x))))


def whole_reference() -> nn.ModuleDict:
    model = make_model()
    inject(model, CONFIG, generator=torch.Generator().manual_seed(1))
    return model


def shard(model: nn.Module) -> None:
    from torch.distributed.fsdp import fully_shard

    mesh = dist.device_mesh.init_device_mesh("cpu", (dist.get_world_size(),))
    for layer in model.children():
        fully_shard(layer, mesh=mesh)


def check_sharded_adapters() -> None:
    reference, model = whole_reference(), make_model()
    inject(model, CONFIG, generator=torch.Generator().manual_seed(99))
    shard(model)
    reset_adapters(model, torch.Generator().manual_seed(1))
    for key, tensor in adapter_state(model).items():
        assert torch.equal(tensor, adapter_state(reference)[key]), key
    trained = {key: tensor + 0.5 for key, tensor in adapter_state(reference).items()}
    load_adapter_state(model, trained)
    load_adapter_state(reference, trained)
    for key, tensor in adapter_state(model).items():
        assert torch.equal(tensor, trained[key]), key
    expected = dict(merged_state(reference))
    merged = dict(merged_state(model))
    assert list(merged) == list(expected)
    for name, tensor in merged.items():
        assert torch.equal(tensor, expected[name]), name
    x = torch.randn(4, 7, generator=torch.Generator().manual_seed(2))
    torch.testing.assert_close(forward(model, x), forward(reference, x))
    with adapter_off(model), adapter_off(reference):
        torch.testing.assert_close(forward(model, x), forward(reference, x))


def rank_main(rank: int, world_size: int, port: int) -> None:
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=rank, world_size=world_size)
    try:
        check_sharded_adapters()
    finally:
        dist.destroy_process_group()


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def test_one_rank_sharded_model_has_the_same_adapters_and_merges() -> None:
    if dist.is_initialized():
        pytest.skip("another test left a process group")
    rank_main(0, 1, free_port())


@pytest.mark.slow
def test_two_rank_sharded_model_has_the_same_adapters_and_merges(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # Spawned processes import this file by name, which importlib mode does not provide for.
    here = Path(__file__)
    monkeypatch.syspath_prepend(str(here.parent))
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(here.parent), *sys.path]))
    import test_sharding as spawnable

    mp.spawn(spawnable.rank_main, args=(2, free_port()), nprocs=2, join=True)

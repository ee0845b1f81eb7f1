"""Compiled and recomputed blocks and dtypes of single modules on two gloo ranks: the gradients of one."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from gloo_ranks import spawn
from ranked_trainer import WIDTH, make_net
from tiny_transformer import WRAP, adapted, gradients, transformer
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from drl.errors import BadInput
from drl.lora.sharding import full_tensor
from drl.model.checkpointing import checkpoint_blocks
from drl.model.compiled import Compilations, compile_blocks
from drl.model.materialize import ShardSettings, spread
from drl.model.parallel import Ranks
from drl.model.precision import Overrides, compute_in, find_overrides, store_frozen

GLOBS = {"proj_out.*": "fp32", "*.norm1.linear.*": "fp32"}


def build(*, lora: bool, forward: str) -> tuple[nn.Module, Overrides]:
    model = transformer(layers=3)
    checkpoint_blocks("transformer", model, WRAP, 0.5)
    if lora:
        adapted(model)
    found = find_overrides("transformer", model, GLOBS, forward)
    if lora:
        store_frozen(model, forward, found)
    compute_in("transformer", model, found, forward)
    return model, found


def ranks_of(rank: int, world: int) -> Ranks:
    mesh = init_device_mesh("cpu", (world,), mesh_dim_names=("shard",))
    return Ranks(rank=rank, world=world, mesh=mesh, talk=dist.new_group(backend="gloo"))


def compare(ranks: Ranks, *, lora: bool, forward: str, tolerance: float) -> None:
    dtype = {"bf16": torch.bfloat16, "fp32": None}[forward]
    alone, _ = build(lora=lora, forward=forward)
    expected = gradients(alone, dtype)
    model, overrides = build(lora=lora, forward=forward)
    settings = ShardSettings(
        forward_dtype=forward, reduce_dtype="fp32", load="all_ranks", shard_frozen="always"
    )
    spread(
        "transformer",
        model,
        wrap=WRAP,
        ranks=ranks,
        settings=settings,
        device="cpu",
        overrides=overrides,
    )
    if overrides.dtypes:
        assert isinstance(model.proj_out, FSDPModule), "gathered apart, in its own dtype"
        stored = model.proj_out.weight.dtype
        assert stored == torch.float32
        with pytest.raises(
            BadInput, match=r"norm1.linear\S* inside a block has a dtype of its own"
        ):
            compile_blocks(model, WRAP, Compilations("trainer", "eager"))
    found = gradients(model, dtype)
    assert found.keys() == expected.keys()
    for name, gradient in found.items():
        whole, right = whole_gradient(gradient, ranks), expected[name]
        scale = right.abs().max().item() + 1e-6
        assert (whole - right).abs().max().item() < tolerance * scale, name


def whole_gradient(gradient: Tensor, ranks: Ranks) -> Tensor:
    """Return the gradient of one rank: sharded ones are sums over ranks with equal rows."""
    return full_tensor(gradient) / ranks.world if isinstance(gradient, DTensor) else gradient


def check_all(rank: int, world: int, folder: Path) -> None:
    ranks = ranks_of(rank, world)
    compare(ranks, lora=True, forward="bf16", tolerance=0.1)
    compare(ranks, lora=False, forward="fp32", tolerance=1e-4)
    compare(ranks, lora=False, forward="bf16", tolerance=0.1)
    compiled_blocks_are_gathered_outside_their_graphs(ranks)
    refuse_a_table(ranks)
    (folder / f"done-{rank}").touch()


def compiled_blocks_are_gathered_outside_their_graphs(ranks: Ranks) -> None:
    x = torch.linspace(-1, 1, 2 * WIDTH).reshape(2, WIDTH)
    settings = ShardSettings(
        forward_dtype="fp32", reduce_dtype="fp32", load="all_ranks", shard_frozen="always"
    )
    for lora in (True, False):
        alone, model = make_net(lora=lora), make_net(lora=lora)
        spread("net", model, wrap=("Block",), ranks=ranks, settings=settings, device="cpu")
        log = Compilations("trainer", "eager")
        assert compile_blocks(model, ("Block",), log) == 2
        for _ in range(2):
            for net in (alone, model):
                net.zero_grad()
                net(x).square().sum().backward()
        assert (log.graphs, log.unexpected) == (2 if lora else 1, 0), log.graphs
        right = dict(alone.named_parameters())
        for name, parameter in model.named_parameters():
            if parameter.grad is not None:
                torch.testing.assert_close(
                    whole_gradient(parameter.grad, ranks), right[name].grad, msg=name
                )


class Table(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.ones(2, 2))
        self.layer = nn.Linear(2, 2)


def refuse_a_table(ranks: Ranks) -> None:
    model = nn.Sequential(Table())
    found = find_overrides("transformer", model, {"0.table": "fp32"}, "bf16")
    settings = ShardSettings(forward_dtype="bf16", reduce_dtype="fp32", load="all_ranks")
    with pytest.raises(BadInput, match=r"0.table lies beside other modules"):
        spread(
            "t",
            model,
            wrap=("Table",),
            ranks=ranks,
            settings=settings,
            device="cpu",
            overrides=found,
        )


def test_two_ranks_have_the_gradients_of_one(tmp_path: Path) -> None:
    spawn(check_all, 2, tmp_path)
    assert sorted(os.listdir(tmp_path))[:2] == ["done-0", "done-1"]

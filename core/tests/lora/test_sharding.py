"""Adapters sharded by FSDP2: same start values, whole states, whole merges (two CPU ranks)."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from gloo_ranks import spawn
from torch import nn

from drl.lora import (
    LoraConfig,
    LoraError,
    active_adapter,
    adapter_off,
    adapter_snapshot,
    adapter_state,
    base_names,
    inject,
    load_adapter_state,
    merge,
    merged_state,
    reset_adapters,
    seed_saved_modules,
    unmerge,
)
from drl.lora.sharding import copy_into, full_tensor

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
    if isinstance(model, Pictures):
        fully_shard(model, mesh=mesh)


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


EVERYTHING = LoraConfig(
    rank=3,
    alpha=6,
    target_modules=("words", "patches", "first"),
    bias="all",
    modules_to_save=("last",),
)
START = LoraConfig(rank=3, alpha=2, target_modules=("first", "last"), init="pissa", use_rslora=True)


class Pictures(nn.Module):
    """One layer of every kind that an adapter can concern."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.words = nn.Embedding(9, 6)
        self.patches = nn.Conv2d(3, 6, 2, stride=2)
        self.norm = nn.LayerNorm(6)
        self.first = nn.Linear(6, 5)
        self.last = nn.Linear(5, 4)

    def forward(self, x: torch.Tensor, label: torch.Tensor) -> torch.Tensor:
        h = self.patches(x).flatten(2).transpose(1, 2) + self.words(label)[:, None]
        return self.last(torch.tanh(self.first(self.norm(h))))


def inputs() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(2)
    x = torch.randn(3, 3, 4, 4, generator=generator)
    return {"x": x, "label": torch.tensor([1, 8, 1])}


def shard_late(model: nn.Module, config: LoraConfig) -> None:
    """The meta route: nothing has values until the base is loaded and the adapter is reset."""
    model.to("meta")
    inject(model, config, generator=torch.Generator().manual_seed(99))
    inject(model, START, generator=torch.Generator(), name="second", trainable=False)
    shard(model)
    model.to_empty(device="cpu")
    base, state = Pictures().state_dict(), model.state_dict()
    for live, plain in base_names(model).items():
        copy_into(state[live], base[plain])
    reset_adapters(model, torch.Generator().manual_seed(1))
    reset_adapters(model, torch.Generator().manual_seed(5), "second")
    seed_saved_modules(model)


def check_every_kind(config: LoraConfig) -> None:
    reference, model = Pictures(), Pictures()
    inject(reference, config, generator=torch.Generator().manual_seed(1))
    shard_late(model, config)
    with pytest.raises(LoraError, match="sharded already"):
        inject(model, config, generator=torch.Generator(), name="third")
    start = adapter_state(reference)
    for key, tensor in adapter_state(model).items():
        assert torch.equal(tensor, start[key]), key
    trained = {key: tensor + 0.25 for key, tensor in start.items()}
    for one in (reference, model):
        load_adapter_state(one, trained)
    snapshot = adapter_snapshot(model, config)
    expected = adapter_snapshot(reference, config)
    assert snapshot.config == expected.config
    for key, tensor in snapshot.tensors.items():
        torch.testing.assert_close(tensor, expected.tensors[key], rtol=0, atol=1e-6)
    # full_tensor of a wrapped model: the merge of each, and the same bits back
    merged = dict(merged_state(reference))
    base = {name: full_tensor(t).clone() for name, t in model.state_dict().items()}
    for name, tensor in merged_state(model):
        torch.testing.assert_close(tensor, merged[name], rtol=0, atol=1e-6)
    given = inputs()
    output = reference(**given)
    torch.testing.assert_close(model(**given), output, rtol=1e-5, atol=1e-5)
    check_in_place(model, given, output, base)
    with adapter_off(model):
        torch.testing.assert_close(model(**given), Pictures()(**given), rtol=1e-5, atol=1e-5)
    with active_adapter(model, "second"):  # pissa at its start is the base model
        torch.testing.assert_close(model(**given), Pictures()(**given), rtol=1e-4, atol=1e-4)
    reshard(model)
    check_gradients(model, reference, given)


def check_in_place(
    model: nn.Module,
    given: dict[str, torch.Tensor],
    output: torch.Tensor,
    base: dict[str, torch.Tensor],
) -> None:
    reshard(model)
    merge(model)
    torch.testing.assert_close(model(**given), output, rtol=1e-4, atol=1e-4)
    reshard(model)
    unmerge(model)
    for name, tensor in model.state_dict().items():
        assert torch.equal(full_tensor(tensor), base[name]), name
    torch.testing.assert_close(model(**given), output, rtol=1e-5, atol=1e-5)


def check_gradients(model: nn.Module, reference: nn.Module, given: dict[str, torch.Tensor]) -> None:
    for one in (model, reference):
        one(**given).square().sum().backward()
    expected = {name: p.grad for name, p in reference.named_parameters() if p.requires_grad}
    for name, parameter in model.named_parameters():
        if name in expected:
            gradient = full_tensor(parameter.grad)
            torch.testing.assert_close(gradient, expected[name], rtol=1e-4, atol=1e-4)
        else:
            assert parameter.grad is None, name


def reshard(model: nn.Module) -> None:
    from torch.distributed.fsdp import FSDPModule

    for part in model.modules():
        if isinstance(part, FSDPModule):
            part.reshard()


def check_all(rank: int, world_size: int, folder: Path) -> None:
    """Check adapters of every kind on a rank of a gloo group."""
    check_sharded_adapters()
    for config in (EVERYTHING, START):
        check_every_kind(config)


def test_one_rank_sharded_model_has_the_same_adapters_and_merges(tmp_path: Path) -> None:
    if dist.is_initialized():
        pytest.skip("another test left a process group")
    store = dist.FileStore(str(tmp_path / "rendezvous"), 1)
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        check_all(0, 1, tmp_path)
    finally:
        dist.destroy_process_group()


@pytest.mark.slow
def test_two_rank_sharded_model_has_the_same_adapters_and_merges(tmp_path: Path) -> None:
    spawn(check_all, 2, tmp_path)

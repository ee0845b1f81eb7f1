"""Which tensors of a trainer's model an engine may read as its own: the base, all of it and nothing else."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from drl.lora import LoraConfig, inject
from drl.model.shared import base_tensors, shared_tensors, unshareable


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(4, 3)
        self.first = nn.Linear(3, 3)
        self.norm = nn.BatchNorm1d(3)
        self.last = nn.Linear(3, 4, bias=False)
        self.last.weight = self.embed.weight
        self.register_buffer("table", torch.arange(3.0), persistent=False)


PLAIN = {
    "embed.weight",
    "first.weight",
    "first.bias",
    "norm.weight",
    "norm.bias",
    "norm.running_mean",
    "norm.running_var",
    "norm.num_batches_tracked",
    "last.weight",
    "table",
}


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"bias": "lora_only"},
        {"bias": "all"},
        {"init": "pissa"},
        {"modules_to_save": ("norm",)},
    ],
)
def test_the_base_is_shared_under_its_plain_names(options: dict[str, object]) -> None:
    net = Net()
    before = {name: (t.data_ptr(), t.clone()) for name, t in base_tensors(net)}
    config = LoraConfig(rank=2, alpha=2, target_modules=("first",), **options)  # type: ignore[arg-type]
    inject(net, config, generator=torch.Generator())
    shared = shared_tensors(net, "cpu")
    assert set(shared) == PLAIN == set(before)
    for name, tensor in shared.items():
        place, values = before[name]
        assert tensor.data_ptr() == place, name
        assert torch.equal(tensor, values), name
        assert not tensor.requires_grad


def test_what_cannot_be_shared_says_why_and_shares_nothing() -> None:
    net = Net()
    assert "no adapters" in str(unshareable(net, "cpu"))
    inject(net, LoraConfig(rank=2, alpha=2, target_modules=("first",)), generator=torch.Generator())
    assert unshareable(net, "cpu") is None
    assert "is on cpu, the engine on cuda:1" in str(unshareable(net, "cuda:1"))
    assert shared_tensors(net, "cuda") == {}
    net.norm.weight.requires_grad_(True)
    assert unshareable(net, "cpu") == "norm.weight is trained"
    assert shared_tensors(net, "cpu") == {}

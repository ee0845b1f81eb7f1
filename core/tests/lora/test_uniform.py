"""What an engine that merges with one rank and alpha can serve; everything else goes merged."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from drl.errors import SyncError
from drl.lora import LoraConfig, active_adapter, inject, merged_state, uniform_adapters
from drl.stages.sync import lora_fields, units


def adapted(toy: nn.Module, **changes: Any) -> nn.Module:
    fields = {"rank": 4, "alpha": 6, "target_modules": ("to_q", "net.2"), **changes}
    inject(toy, LoraConfig(**fields), generator=torch.Generator().manual_seed(0))
    return toy


def test_plain_adapters_are_uniform(toy: nn.Module) -> None:
    assert not uniform_adapters(toy)
    assert uniform_adapters(adapted(toy))
    assert (lora_fields(toy).rank, lora_fields(toy).alpha) == (4, 6)
    names = [name for unit in units("lora", toy) for name, _ in unit]
    assert len(names) == 2 * 6


@pytest.mark.parametrize(
    "changes",
    [
        {"rank_pattern": {"to_q": 2}},
        {"alpha_pattern": {"net.2": 1.0}},
        {"use_rslora": True},
        {"bias": "all"},
        {"bias": "lora_only"},
        {"modules_to_save": ("lora_head",)},
        {"target_modules": ("to_q", "conv_in")},
        {"target_modules": ("to_q", "label_emb")},
        {"init": "pissa"},
        {"init": "olora"},
    ],
    ids=str,
)
def test_what_rank_and_alpha_do_not_say_is_never_pushed_as_matrices_alone(
    toy: nn.Module, changes: dict[str, Any]
) -> None:
    adapted(toy, **changes)
    assert not uniform_adapters(toy)
    with pytest.raises(SyncError, match="in_process_merged"):
        lora_fields(toy)
    merged = dict(merged_state(toy))
    pushed = dict(pair for unit in units("merged", toy) for pair in unit)
    assert list(pushed) == list(merged)
    assert all(torch.equal(pushed[name], tensor) for name, tensor in merged.items())


def test_patterns_and_rslora_that_change_nothing_are_uniform(toy: nn.Module) -> None:
    assert uniform_adapters(adapted(toy, rank=1, use_rslora=True, rank_pattern={"to_q": 1}))


def test_a_second_adapter_matters_only_while_it_is_active(toy: nn.Module) -> None:
    adapted(toy)
    other = LoraConfig(rank=2, alpha=3, target_modules=("to_v",), bias="all")
    inject(toy, other, generator=torch.Generator(), name="old", trainable=False)
    assert uniform_adapters(toy)
    with active_adapter(toy, "old"):
        assert not uniform_adapters(toy)

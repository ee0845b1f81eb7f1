"""Trained biases and saved modules on disk: damage is named, nothing is left out."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from drl.lora import LoraConfig, LoraError, inject, load_peft, save_peft

Make = Callable[..., nn.Module]
Inputs = dict[str, torch.Tensor]
SAVED = ("refiner.proj_out", "label_emb", "lora_head")


def config(**changes: Any) -> LoraConfig:
    return LoraConfig(**{"rank": 4, "alpha": 6, "target_modules": ("to_q", "to_k"), **changes})


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


BOTH = config(modules_to_save=SAVED, bias="all")


def damaged(path: Path, change: Callable[[Inputs], Inputs]) -> Path:
    file = path / "adapter_model.safetensors"
    save_file(change(load_file(file)), file)
    return path


BIAS = "base_model.model.blocks.1.ff.net.2.bias"
HEAD = "base_model.model.lora_head.weight"


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (
            lambda s: {k: v for k, v in s.items() if k != BIAS},
            "missing keys: blocks.1.ff.net.2.bias",
        ),
        (lambda s: {k: v for k, v in s.items() if k != HEAD}, "missing keys: lora_head.weight"),
        (lambda s: {k: v for k, v in s.items() if "lora_head" not in k}, '"?lora_head'),
        (lambda s: {**s, HEAD: s[HEAD][:-1].contiguous()}, "shape mismatch at lora_head.weight"),
        (lambda s: {**s, HEAD: s[HEAD] * torch.nan}, "non-finite adapter tensor lora_head.weight"),
        (lambda s: {**s, HEAD: s[HEAD].to(torch.int8)}, "lora_head.weight has dtype torch.int8"),
        (lambda s: {**s, BIAS: s[BIAS].to(torch.int8)}, "net.2.bias has dtype torch.int8"),
        (
            lambda s: {**s, HEAD.replace("weight", "extra"): s[HEAD].clone()},
            "unexpected keys: lora_head",
        ),
    ],
)
def test_damaged_biases_and_copies_are_refused_by_name_before_any_change(
    toy: nn.Module, make_toy: Make, tmp_path: Path, change: Callable[[Inputs], Inputs], words: str
) -> None:
    inject(toy, BOTH, generator=seeded())
    save_peft(toy, tmp_path / "a", BOTH, base_model=None)
    fresh = make_toy()
    with pytest.raises(LoraError, match=words):
        load_peft(fresh, damaged(tmp_path / "a", change))
    assert str(fresh) == str(make_toy())


def test_a_config_that_hides_trained_parts_is_not_written(toy: nn.Module, tmp_path: Path) -> None:
    inject(toy, BOTH, generator=seeded())
    for wrong, word in (({"bias": "all"}, "saved modules"), ({"modules_to_save": SAVED}, "biases")):
        with pytest.raises(LoraError, match=word):
            save_peft(toy, tmp_path / "a", config(**wrong), base_model=None)
    assert list(tmp_path.iterdir()) == []


def test_counters_of_a_saved_module_travel_too(tmp_path: Path) -> None:
    def make() -> nn.Module:
        return nn.ModuleDict({"q": nn.Linear(3, 3), "norm": nn.BatchNorm1d(3)})

    model, plan = make(), config(target_modules=("q",), modules_to_save=("norm",))
    inject(model, plan, generator=seeded())
    model["norm"].train()(torch.randn(8, 3, generator=seeded(1)))
    save_peft(model, tmp_path / "a", plan, base_model=None)
    again = make()
    load_peft(again, tmp_path / "a")
    copy = again["norm"].modules_to_save["default"]
    assert copy.num_batches_tracked.item() == 1
    assert torch.equal(copy.running_var, model["norm"].modules_to_save["default"].running_var)
    assert again["norm"].original_module.num_batches_tracked.item() == 0

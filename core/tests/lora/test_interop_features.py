"""Every feature in both directions with stock PEFT: its file here, ours there, equal outputs."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from drl.lora import (
    LoraConfig,
    active_adapter,
    adapter_off,
    adapter_state,
    inject,
    load_peft,
    merged_state,
    read_peft,
    save_peft,
)

Make = Callable[..., nn.Module]
Inputs = dict[str, torch.Tensor]
pytestmark = pytest.mark.filterwarnings("ignore")

# In PEFT's spelling; both tools are built from these fields.
FEATURES: dict[str, dict[str, Any]] = {
    "bias_all": {"target_modules": ["to_q", "to_k"], "bias": "all"},
    "bias_lora_only": {"target_modules": ["to_q", "conv_in"], "bias": "lora_only"},
    "saved": {"target_modules": ["to_q"], "modules_to_save": ["lora_head", "label_emb"]},
    "saved_suffix": {"target_modules": ["to_k"], "modules_to_save": ["proj_out"]},
    "saved_part": {"target_modules": ["to_v", "net.2"], "modules_to_save": ["blocks.1.ff"]},
    "conv": {"target_modules": ["conv_in", "net.2"], "use_rslora": True},
    "embedding": {"target_modules": ["label_emb", "to_q"]},
    "layers": {
        "target_modules": ["to_q", "net.2"],
        "layers_to_transform": [0, 2],
        "layers_pattern": "blocks",
    },
    "one_layer": {
        "target_modules": ["to_v"],
        "layers_to_transform": 1,
        "layers_pattern": ["blocks", "layers"],
    },
    "orthogonal": {"target_modules": ["to_q"], "init_lora_weights": "orthogonal"},
    "random": {"target_modules": ["to_q", "label_emb"], "init_lora_weights": False},
    "pissa": {"target_modules": ["to_q", "net.2"], "init_lora_weights": "pissa"},
    "olora": {"target_modules": ["to_q"], "init_lora_weights": "olora", "use_rslora": True},
    "everything": {
        "target_modules": ["conv_in", "label_emb", "to_q", "net.0.proj"],
        "modules_to_save": ["refiner.proj_out"],
        "bias": "lora_only",
        "use_rslora": True,
        "rank_pattern": {"conv_in": 2, "blocks.1.attn.to_q": 6},
        "alpha_pattern": {"label_emb": 5.0},
        "exclude_modules": ["blocks.2.attn.to_q"],
    },
}
STRENGTH = {"r": 4, "lora_alpha": 6}


@pytest.fixture(params=FEATURES)
def fields(request: pytest.FixtureRequest) -> dict[str, Any]:
    return {**STRENGTH, **FEATURES[request.param]}


def ours_of(fields: dict[str, Any]) -> LoraConfig:
    unmatched = {"layers_pattern": "blocks"} if "layers_pattern" in fields else {}
    return LoraConfig.from_fields({**fields, **unmatched})


def close(one: torch.Tensor, two: torch.Tensor) -> bool:
    return torch.allclose(one, two, rtol=1e-4, atol=5e-5)


def stock_model(make_toy: Make, fields: dict[str, Any]) -> nn.Module:
    """A PEFT model whose trained tensors have all moved a little."""
    peft = pytest.importorskip("peft")
    with torch.random.fork_rng():
        torch.manual_seed(0)
        stock = peft.get_peft_model(make_toy(), peft.LoraConfig(**fields)).eval()
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in stock.parameters():
            if parameter.requires_grad:
                parameter.add_(0.2 * torch.randn(parameter.shape, generator=generator))
    return stock


@torch.no_grad()
def test_what_drl_writes_computes_the_same_in_peft(
    fields: dict[str, Any],
    make_toy: Make,
    toy_inputs: Inputs,
    train_a_little: Callable[[nn.Module], None],
    tmp_path: Path,
) -> None:
    peft = pytest.importorskip("peft")
    model, config = make_toy(), ours_of(fields)
    inject(model, config, generator=torch.Generator().manual_seed(0))
    train_a_little(model)
    save_peft(model, tmp_path / "a", config, base_model="toy")
    stock = peft.PeftModel.from_pretrained(make_toy(), tmp_path / "a")
    assert close(stock(**toy_inputs), model(**toy_inputs))
    assert not close(make_toy()(**toy_inputs), model(**toy_inputs))
    plain = make_toy()
    plain.load_state_dict(dict(merged_state(model)), strict=True)
    assert close(stock.merge_and_unload()(**toy_inputs), plain(**toy_inputs))


@torch.no_grad()
def test_what_peft_writes_computes_the_same_here(
    fields: dict[str, Any], make_toy: Make, toy_inputs: Inputs, tmp_path: Path
) -> None:
    stock = stock_model(make_toy, fields)
    stock.save_pretrained(tmp_path / "a")
    ours = make_toy()
    load_peft(ours, tmp_path / "a")
    expected = stock(**toy_inputs)
    assert close(ours(**toy_inputs), expected)
    plain = make_toy()
    plain.load_state_dict(dict(merged_state(ours)), strict=True)
    assert close(plain(**toy_inputs), expected)
    with adapter_off(ours):
        assert torch.equal(ours(**toy_inputs), make_toy().requires_grad_(False)(**toy_inputs))


@torch.no_grad()
def test_peft_saves_the_same_tensors_again(
    fields: dict[str, Any],
    make_toy: Make,
    train_a_little: Callable[[nn.Module], None],
    tmp_path: Path,
) -> None:
    peft = pytest.importorskip("peft")
    model, config = make_toy(), ours_of(fields)
    inject(model, config, generator=torch.Generator().manual_seed(0))
    train_a_little(model)
    save_peft(model, tmp_path / "a", config, base_model="toy")
    peft.PeftModel.from_pretrained(make_toy(), tmp_path / "a").save_pretrained(tmp_path / "b")
    _, written = read_peft(tmp_path / "a")
    _, again = read_peft(tmp_path / "b")
    assert set(again) == set(written)
    assert all(torch.equal(again[key], tensor) for key, tensor in written.items())


def test_both_tools_train_and_store_the_same_tensors(
    fields: dict[str, Any], make_toy: Make, tmp_path: Path
) -> None:
    if fields.get("init_lora_weights") in ("pissa", "olora"):
        pytest.skip("stored converted")
    stock_model(make_toy, fields).save_pretrained(tmp_path / "stock")
    _, theirs = read_peft(tmp_path / "stock")
    model, config = make_toy(), ours_of(fields)
    inject(model, config, generator=torch.Generator().manual_seed(0))
    mine = adapter_state(model)
    assert {key: tensor.shape for key, tensor in mine.items()} == {
        key: tensor.shape for key, tensor in theirs.items()
    }


@torch.no_grad()
def test_two_adapters_of_one_peft_model(make_toy: Make, toy_inputs: Inputs, tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    first = {**STRENGTH, "target_modules": ["to_q"], "init_lora_weights": False}
    second = {"r": 2, "lora_alpha": 1, "target_modules": ["net.2"], "init_lora_weights": False}
    stock = stock_model(make_toy, first)
    stock.add_adapter("old", peft.LoraConfig(**second))
    stock.save_pretrained(tmp_path / "a")
    ours = make_toy()
    load_peft(ours, tmp_path / "a")
    load_peft(ours, tmp_path / "a" / "old", name="old", trainable=False)
    for name in ("default", "old"):
        stock.set_adapter(name)
        with active_adapter(ours, name):
            assert close(ours(**toy_inputs), stock(**toy_inputs))
    stock.base_model.set_adapter(["default", "old"])
    with active_adapter(ours, "default", "old"):
        assert close(ours(**toy_inputs), stock(**toy_inputs))


def test_the_written_fields_are_few_and_known_to_peft(
    fields: dict[str, Any], make_toy: Make, tmp_path: Path
) -> None:
    peft = pytest.importorskip("peft")
    model, config = make_toy(), ours_of(fields)
    inject(model, config, generator=torch.Generator().manual_seed(0))
    save_peft(model, tmp_path / "a", config, base_model="toy")
    written = json.loads((tmp_path / "a" / "adapter_config.json").read_text())
    known = set(peft.LoraConfig(r=1, target_modules=["x"]).to_dict())
    assert set(written) <= known
    assert ("layers_pattern" in written) == ("layers_to_transform" in fields)

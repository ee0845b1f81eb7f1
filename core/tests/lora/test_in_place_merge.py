"""Merging into the weights and back: exact bits, in order, idempotent, and never half done."""

from __future__ import annotations

import hashlib
from collections.abc import Callable

import pytest
import torch
from torch import nn

from drl.lora import (
    LoraConfig,
    LoraError,
    active_adapter,
    adapter_names,
    adapter_off,
    adapter_state,
    inject,
    load_adapter_state,
    lora_layers,
    merge,
    merged_state,
    remove_adapter,
    reset_adapters,
    unmerge,
)

Inputs = dict[str, torch.Tensor]
ONE = LoraConfig(rank=4, alpha=6, target_modules=("to_q", "conv_in", "label_emb"), bias="lora_only")
TWO = LoraConfig(rank=2, alpha=3, target_modules=("to_q", "proj_out"), modules_to_save=("ff",))
START = LoraConfig(rank=2, alpha=3, target_modules=("to_v",), init="pissa")


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def digest(module: nn.Module) -> str:
    sha = hashlib.sha256()
    for name, tensor in module.state_dict().items():
        sha.update(name.encode())
        sha.update(tensor.contiguous().view(torch.uint8).numpy().tobytes())
    return sha.hexdigest()


@pytest.fixture
def model(
    make_toy: Callable[..., nn.Module], train_a_little: Callable[[nn.Module], None]
) -> nn.Module:
    """Three adapters over a bf16 base, all trained a little; "one" is active."""
    toy = make_toy().bfloat16()
    for number, (name, config) in enumerate({"three": START, "two": TWO, "one": ONE}.items()):
        inject(toy, config, generator=seeded(number), name=name)
        train_a_little(toy)
    return toy


def run(module: nn.Module, inputs: Inputs) -> torch.Tensor:
    with torch.no_grad():
        output: torch.Tensor = module(inputs["x"].to(module.dtype), inputs["label"])
    return output.float()


@pytest.fixture(autouse=True)
def dtype_of_toys(monkeypatch: pytest.MonkeyPatch, toy: nn.Module) -> None:
    monkeypatch.setattr(
        type(toy), "dtype", property(lambda self: next(self.parameters()).dtype), raising=False
    )


def test_merged_weights_are_those_of_the_stream_and_unmerging_restores_the_bits(
    model: nn.Module, toy_inputs: Inputs
) -> None:
    before, expected = digest(model), dict(merged_state(model))
    output = run(model, toy_inputs)
    assert merge(model) == ("one",)
    assert digest(model) != before
    for fqn, layer in lora_layers(model).items():
        assert torch.equal(layer.weight, expected[f"{fqn}.weight"]), fqn
    for name, tensor in merged_state(model):
        assert torch.equal(tensor, expected[name])
    assert (run(model, toy_inputs) - output).norm() < 0.02 * output.norm()
    unmerge(model)
    assert digest(model) == before
    assert torch.equal(run(model, toy_inputs), output)


def test_merging_is_idempotent_and_ordered(model: nn.Module) -> None:
    before = digest(model)
    merge(model, "one")
    once = digest(model)
    assert merge(model, "one") == merge(model) == ("one",)
    assert digest(model) == once
    assert merge(model, "three") == ("one", "three")
    unmerge(model)
    unmerge(model)
    assert digest(model) == before
    assert merge(model, "three", "one") == ("three", "one")
    # the same sum of float32 updates, so the same weights but for the order of additions
    for layer in lora_layers(model).values():
        assert layer.merged == ("three", "one")


def test_two_merged_adapters_are_the_sum_from_the_pristine_base(
    model: nn.Module, toy_inputs: Inputs
) -> None:
    with active_adapter(model, "one", "three"):
        expected = dict(merged_state(model))
        output = run(model, toy_inputs)
    merge(model, "one")
    merge(model, "three")
    for fqn, layer in lora_layers(model).items():
        assert torch.equal(layer.weight, expected[f"{fqn}.weight"])
    assert (run(model, toy_inputs) - output).norm() < 0.02 * output.norm()


def test_thousand_cycles_leave_the_base_byte_equal(model: nn.Module) -> None:
    layer = nn.ModuleDict({"proj_out": model.proj_out, "to_q": model.blocks[0].attn.to_q})
    before = digest(layer)
    merge(layer, "two")
    merged = digest(layer)
    for _ in range(1000):
        unmerge(layer)
        merge(layer, "two")
    assert digest(layer) == merged
    unmerge(layer)
    assert digest(layer) == before


def test_saved_modules_follow_the_merged_adapter(model: nn.Module, toy_inputs: Inputs) -> None:
    with active_adapter(model, "two"):
        output = run(model, toy_inputs)
    merge(model, "two")
    assert (run(model, toy_inputs) - output).norm() < 0.02 * output.norm()
    ff = model.blocks[0].ff
    assert ff.current is ff.modules_to_save["two"]


def test_nothing_is_switched_added_or_removed_while_merged(model: nn.Module) -> None:
    merge(model)
    with pytest.raises(LoraError, match="call unmerge first"), adapter_off(model):
        pass
    with pytest.raises(LoraError, match="call unmerge first"), active_adapter(model, "two"):
        pass
    with pytest.raises(LoraError, match="unmerge"):
        inject(model, TWO, generator=seeded(), name="four")
    with pytest.raises(LoraError, match="unmerge"):
        remove_adapter(model, "one")
    with pytest.raises(LoraError, match="unmerge"):
        load_adapter_state(model, adapter_state(model, "one"), "one")
    with pytest.raises(LoraError, match="unmerge"):
        reset_adapters(model, seeded(), "one")
    assert set(adapter_names(model)) == {"one", "two", "three"}
    unmerge(model)
    with adapter_off(model):
        pass


def test_a_result_that_is_not_finite_merges_nothing(model: nn.Module) -> None:
    with torch.no_grad():
        model.label_emb.factors("one")[0].fill_(3e38)
    before = digest(model)
    with pytest.raises(LoraError, match="the merged weight of label_emb is not finite"):
        merge(model, "one")
    assert digest(model) == before
    assert not any(layer.merged or layer.pristine for layer in lora_layers(model).values())


def test_tied_weights_and_unknown_names_are_refused(toy: nn.Module) -> None:
    toy.refiner.proj_out.weight = toy.proj_out.weight
    config = LoraConfig(rank=2, alpha=2, target_modules=r"proj_out")
    inject(toy, config, generator=seeded())
    with pytest.raises(LoraError, match="tied"):
        merge(toy)
    with pytest.raises(LoraError, match='no adapters called "old"'):
        merge(toy, "old")
    with pytest.raises(LoraError, match="no adapter"):
        merge(nn.ModuleDict({"a": nn.Linear(2, 2)}))


def test_a_saved_copy_of_a_tied_module_is_refused(toy: nn.Module) -> None:
    toy.lora_head = nn.Linear(8, 4, bias=False)
    toy.lora_head.weight = toy.label_emb.weight
    config = LoraConfig(rank=2, alpha=2, target_modules=("to_q",), modules_to_save=("label_emb",))
    inject(toy, config, generator=seeded())
    with pytest.raises(LoraError, match=r"label_emb.weight is tied to lora_head.weight"):
        list(merged_state(toy))


def test_the_module_goes_on_training_after_a_merge_cycle(
    model: nn.Module, toy_inputs: Inputs
) -> None:
    merge(model)
    unmerge(model)
    output = model(toy_inputs["x"].bfloat16(), toy_inputs["label"])
    output.float().square().sum().backward()
    trained = [p for n, p in model.named_parameters() if ".one." in n or n.endswith(".one")]
    assert trained
    assert all(p.grad is not None for p in trained)

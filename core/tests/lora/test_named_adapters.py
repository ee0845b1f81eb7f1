"""Several adapters in one model: which ones compute, which one trains, and taking them out."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

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
    adapters,
    inject,
    load_adapter_state,
    load_peft,
    lora_layers,
    remove_adapter,
    reset_adapters,
    save_peft,
    train_adapter,
    use_adapters,
)

Inputs = dict[str, torch.Tensor]
ONE = LoraConfig(rank=4, alpha=8, target_modules=("to_q", "proj_out"))
TWO = LoraConfig(rank=2, alpha=3, target_modules=("to_q", "net.2", "conv_in"))


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


@pytest.fixture
def both(toy: nn.Module, train_a_little: Callable[[nn.Module], None]) -> nn.Module:
    """Adapter "default" trains; "old" is frozen, has other targets, and values of its own."""
    inject(toy, ONE, generator=seeded(1))
    train_a_little(toy)
    inject(toy, TWO, generator=seeded(2), name="old")
    train_adapter(toy, "old")
    train_a_little(toy)
    train_adapter(toy, "default")
    use_adapters(toy, "default")
    return toy


def alone(
    make_toy: Callable[..., nn.Module], config: LoraConfig, state: Inputs, inputs: Inputs
) -> torch.Tensor:
    model = make_toy()
    inject(model, config, generator=seeded())
    load_adapter_state(model, state)
    return model(**inputs)


def test_each_adapter_computes_what_it_computes_alone(
    both: nn.Module, make_toy: Callable[..., nn.Module], toy_inputs: Inputs
) -> None:
    states = {name: adapter_state(both, name) for name in adapter_names(both)}
    assert set(states) == {"default", "old"}
    for name, config in (("default", ONE), ("old", TWO)):
        expected = alone(make_toy, config, states[name], toy_inputs)
        with active_adapter(both, name):
            assert torch.equal(both(**toy_inputs), expected)
    with adapter_off(both):
        assert torch.equal(both(**toy_inputs), make_toy().requires_grad_(False)(**toy_inputs))


def test_updates_of_several_active_adapters_add_up() -> None:
    model = nn.ModuleDict({"a": nn.Linear(5, 4)})
    x = torch.randn(3, 5, generator=seeded(7))
    config = LoraConfig(rank=2, alpha=2, target_modules=("a",), init="random")
    for number, name in enumerate(("one", "two")):
        inject(model, config, generator=seeded(number), name=name)
    one, two = (adapters(model, name)["a"] for name in ("one", "two"))
    with active_adapter(model, "one", "two"):
        both = model["a"](x)
    delta = x @ one.A.T @ one.B.T + x @ two.A.T @ two.B.T
    torch.testing.assert_close(both, model["a"].base_layer(x) + delta, rtol=1e-5, atol=1e-6)


def test_contexts_nest_and_restore_on_exceptions(both: nn.Module, toy_inputs: Inputs) -> None:
    first = both(**toy_inputs)
    with active_adapter(both, "old"):
        old = both(**toy_inputs)
        with adapter_off(both), active_adapter(both, "default"):
            assert torch.equal(both(**toy_inputs), first)
        assert torch.equal(both(**toy_inputs), old)
        with pytest.raises(ValueError, match="inside"), adapter_off(both):
            raise ValueError("inside")
        assert torch.equal(both(**toy_inputs), old)
        with pytest.raises(LoraError, match="refrence"), active_adapter(both, "refrence"):
            pass
        assert torch.equal(both(**toy_inputs), old)
    assert torch.equal(both(**toy_inputs), first)
    assert not torch.allclose(old, first)


def test_switching_for_good(both: nn.Module, toy_inputs: Inputs) -> None:
    with active_adapter(both, "old"):
        old = both(**toy_inputs)
    use_adapters(both, "old")
    assert torch.equal(both(**toy_inputs), old)
    with pytest.raises(LoraError, match="adapter_off"):
        use_adapters(both)
    with pytest.raises(LoraError, match="named twice"):
        use_adapters(both, "old", "old")


def test_only_the_chosen_adapter_trains(both: nn.Module, toy_inputs: Inputs) -> None:
    both(**toy_inputs).sum().backward()
    with_gradient = {name for name, p in both.named_parameters() if p.grad is not None}
    assert with_gradient == {name for name, _ in both.named_parameters() if ".default." in name}
    train_adapter(both, "old")
    trainable = {name for name, p in both.named_parameters() if p.requires_grad}
    assert trainable == {name for name, _ in both.named_parameters() if ".old." in name}


def test_a_frozen_adapter_neither_trains_nor_computes_when_it_is_added(toy: nn.Module) -> None:
    inject(toy, ONE, generator=seeded())
    before = {name for name, p in toy.named_parameters() if p.requires_grad}
    inject(toy, TWO, generator=seeded(), name="reference", trainable=False)
    assert {name for name, p in toy.named_parameters() if p.requires_grad} == before
    assert {layer.active for layer in lora_layers(toy).values()} == {("default",)}
    inject(toy, TWO, generator=seeded(), name="next")
    assert {layer.active for layer in lora_layers(toy).values()} == {("next",)}
    trainable = {name for name, p in toy.named_parameters() if p.requires_grad}
    assert trainable == {name for name, _ in toy.named_parameters() if ".next." in name}


def test_a_model_may_start_with_a_frozen_adapter(toy: nn.Module, toy_inputs: Inputs) -> None:
    config = LoraConfig(rank=4, alpha=8, target_modules=("to_q",), init="random")
    before = toy(**toy_inputs)
    inject(toy, config, generator=seeded(), trainable=False)
    assert not any(parameter.requires_grad for parameter in toy.parameters())
    assert not torch.allclose(toy(**toy_inputs), before)


def test_removing_gives_the_plain_modules_back(
    both: nn.Module, make_toy: Callable[..., nn.Module], toy_inputs: Inputs
) -> None:
    with active_adapter(both, "old"):
        old = both(**toy_inputs)
    remove_adapter(both, "default")
    assert adapter_names(both) == ("old",)
    assert isinstance(both.proj_out, nn.Linear)
    assert "proj_out" not in lora_layers(both)
    with active_adapter(both, "old"):
        assert torch.equal(both(**toy_inputs), old)
    remove_adapter(both, "old")
    assert str(both) == str(make_toy())
    assert list(both.state_dict()) == list(make_toy().state_dict())
    with pytest.raises(LoraError, match="no adapters"):
        remove_adapter(both, "old")


def test_adapters_are_reset_and_loaded_one_by_one(both: nn.Module) -> None:
    old = {key: tensor.clone() for key, tensor in adapter_state(both, "old").items()}
    reset_adapters(both, seeded(5), "default")
    assert all(torch.equal(t, old[key]) for key, t in adapter_state(both, "old").items())
    assert all(torch.count_nonzero(a.B) == 0 for a in adapters(both).values())
    load_adapter_state(both, {key: tensor + 1 for key, tensor in old.items()}, "old")
    assert all(torch.equal(t, old[key] + 1) for key, t in adapter_state(both, "old").items())
    with pytest.raises(LoraError, match='no adapters called "other"; it has old, default'):
        load_adapter_state(both, old, "other")


@pytest.mark.parametrize("name", ["", "a.b", "lora", "lora_", "_", "ora", "keys", "training"])
def test_names_that_no_file_or_container_can_carry_are_refused(toy: nn.Module, name: str) -> None:
    before = str(toy)
    with pytest.raises(LoraError, match="cannot be the name of an adapter"):
        inject(toy, ONE, generator=seeded(), name=name)
    assert str(toy) == before


@pytest.mark.parametrize("name", ["lora_A", "weight", "base_layer", "to_q", "attn", "1", "blocks"])
def test_names_of_modules_and_parts_are_fine(
    toy: nn.Module,
    make_toy: Callable[..., nn.Module],
    toy_inputs: Inputs,
    tmp_path: Any,
    train_a_little: Callable[[nn.Module], None],
    name: str,
) -> None:
    inject(toy, ONE, generator=seeded(), name=name)
    inject(toy, ONE, generator=seeded(3), name=f"{name}_2", trainable=False)
    train_a_little(toy)
    state = adapter_state(toy, name)
    assert next(iter(state)) == "blocks.0.attn.to_q.lora_A.weight"
    assert len(state) == len(adapter_state(toy, f"{name}_2")) == 2 * 5
    save_peft(state, tmp_path / "a", ONE, base_model=None)
    again = make_toy()
    load_peft(again, tmp_path / "a", name=name)
    assert torch.equal(again(**toy_inputs), toy(**toy_inputs))


def test_a_name_that_is_taken_is_refused(both: nn.Module) -> None:
    with pytest.raises(LoraError, match='already has adapters called "old"'):
        inject(both, ONE, generator=seeded(), name="old")


def test_loading_into_a_second_adapter_leaves_the_first_alone(
    both: nn.Module, make_toy: Callable[..., nn.Module], toy_inputs: Inputs, tmp_path: Any
) -> None:
    with active_adapter(both, "old"):
        old = both(**toy_inputs)
    save_peft(adapter_state(both, "old"), tmp_path / "old", TWO, base_model=None)
    model = make_toy()
    inject(model, ONE, generator=seeded(1))
    before = model(**toy_inputs)
    load_peft(model, tmp_path / "old", name="reference", trainable=False)
    assert torch.equal(model(**toy_inputs), before)
    with active_adapter(model, "reference"):
        assert torch.equal(model(**toy_inputs), old)
    assert not any(p.requires_grad for n, p in model.named_parameters() if ".reference." in n)


def test_compiled_model_follows_the_active_adapter(toy_inputs: Inputs, both: nn.Module) -> None:
    compiled = torch.compile(both, backend="eager", fullgraph=True)
    for name in ("default", "old", "default"):
        with active_adapter(compiled, name):
            assert torch.equal(compiled(**toy_inputs), both(**toy_inputs))
    with active_adapter(compiled, "default", "old"):
        assert torch.equal(compiled(**toy_inputs), both(**toy_inputs))

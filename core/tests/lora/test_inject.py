"""Injection, start values, and the reference policy."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from drl.lora import (
    LoraConfig,
    LoraError,
    LoraLinear,
    adapter_off,
    adapter_state,
    adapters,
    inject,
    lora_layers,
    reset_adapters,
)

TARGETS = ("to_q", "to_out.0", "proj_out")


def config(**changes: Any) -> LoraConfig:
    return LoraConfig(**{"rank": 4, "alpha": 8, "target_modules": TARGETS, **changes})


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def states_equal(one: dict[str, torch.Tensor], two: dict[str, torch.Tensor]) -> bool:
    return list(one) == list(two) and all(torch.equal(one[key], two[key]) for key in one)


def test_names_come_back_in_registration_order(toy: nn.Module) -> None:
    names = inject(toy, config(), generator=seeded())
    per_block = [(f"blocks.{i}.attn.to_q", f"blocks.{i}.attn.to_out.0") for i in range(3)]
    assert list(names) == [n for pair in per_block for n in pair] + ["refiner.proj_out", "proj_out"]
    assert list(adapters(toy)) == list(names)


def test_wrapped_structure_and_parameter_names(toy: nn.Module) -> None:
    inject(toy, config(), generator=seeded())
    named = dict(toy.named_parameters())
    assert named["blocks.0.attn.to_q.lora_A.default.weight"].shape == (4, 8)
    assert named["blocks.0.attn.to_q.lora_B.default.weight"].shape == (8, 4)
    assert "blocks.0.attn.to_q.base_layer.bias" in named
    assert "blocks.0.attn.to_k.weight" in named


def test_only_adapters_train(toy: nn.Module) -> None:
    inject(toy, config(), generator=seeded())
    trainable = {name for name, p in toy.named_parameters() if p.requires_grad}
    assert trainable == {name for name, _ in toy.named_parameters() if ".lora_" in name}
    assert len(trainable) == 16


@pytest.mark.parametrize("init", ["gaussian", "kaiming-uniform"])
def test_fresh_adapter_changes_nothing(
    toy: nn.Module, toy_inputs: dict[str, torch.Tensor], init: str
) -> None:
    # Frozen first: F.linear takes another kernel, 1 ulp apart, for weights that require gradients.
    before = toy.requires_grad_(False)(**toy_inputs)
    inject(toy, config(init=init), generator=seeded())
    assert torch.equal(toy(**toy_inputs), before)


def test_gaussian_start_has_standard_deviation_one_over_rank() -> None:
    model = nn.ModuleDict({"wide": nn.Linear(4000, 16)})
    inject(model, config(rank=16, target_modules=("wide",)), generator=seeded())
    A = adapters(model)["wide"].A
    assert A.mean().abs() < 5 / 16 / math.sqrt(A.numel())
    assert A.std().item() == pytest.approx(1 / 16, rel=0.02)
    assert torch.count_nonzero(adapters(model)["wide"].B) == 0


def test_kaiming_start_is_uniform_up_to_one_over_root_of_inputs() -> None:
    model = nn.ModuleDict({"wide": nn.Linear(400, 16)})
    changes = {"rank": 64, "target_modules": ("wide",), "init": "kaiming-uniform"}
    inject(model, config(**changes), generator=seeded())
    A, bound = adapters(model)["wide"].A, 1 / 20
    assert A.abs().max() <= bound
    assert A.abs().max() > 0.99 * bound
    assert A.std().item() == pytest.approx(bound / math.sqrt(3), rel=0.02)


def test_gaussian_start_uses_each_modules_own_rank() -> None:
    model = nn.ModuleDict({"a": nn.Linear(4000, 8), "b": nn.Linear(4000, 8)})
    changes = {"target_modules": ("a", "b"), "rank_pattern": {"b": 16}}
    inject(model, config(**changes), generator=seeded())
    assert adapters(model)["a"].A.std().item() == pytest.approx(1 / 4, rel=0.03)
    assert adapters(model)["b"].A.std().item() == pytest.approx(1 / 16, rel=0.03)


def test_start_depends_on_the_seed_only(make_toy: Callable[..., nn.Module]) -> None:
    states = []
    for seed, global_seed in ((0, 1), (0, 2), (1, 1)):
        torch.manual_seed(global_seed)
        model = make_toy()
        inject(model, config(), generator=seeded(seed))
        states.append(adapter_state(model))
    assert states_equal(states[0], states[1])
    assert not states_equal(states[0], states[2])


def test_start_does_not_depend_on_registration_order() -> None:
    one = nn.ModuleDict({"a": nn.Linear(3, 3), "b": nn.Linear(5, 3)})
    two = nn.ModuleDict({"b": one["b"], "a": one["a"]})
    for model in (one, two):
        inject(model, config(target_modules=("a", "b")), generator=seeded())
    for key, tensor in adapter_state(one).items():
        assert torch.equal(tensor, adapter_state(two)[key])


def test_injection_leaves_the_global_generator_alone(toy: nn.Module) -> None:
    torch.manual_seed(7)
    expected = torch.rand(3)
    torch.manual_seed(7)
    inject(toy, config(), generator=seeded())
    assert torch.equal(torch.rand(3), expected)


def test_adapters_are_float32_over_a_bfloat16_base_unless_told(toy: nn.Module) -> None:
    inject(toy.bfloat16(), config(), generator=seeded())
    assert {layer.down.dtype for layer in lora_layers(toy).values()} == {torch.float32}
    assert toy.proj_out.base_layer.weight.dtype == torch.bfloat16


def test_adapter_dtype_is_the_rounded_float32_start(make_toy: Callable[..., nn.Module]) -> None:
    full, half = make_toy(), make_toy()
    inject(full, config(), generator=seeded())
    inject(half, config(), generator=seeded(), dtype=torch.bfloat16)
    for key, tensor in adapter_state(half).items():
        assert torch.equal(tensor, adapter_state(full)[key].bfloat16())


def test_meta_module_defers_the_start_to_reset(make_toy: Callable[..., nn.Module]) -> None:
    direct, deferred = make_toy(), make_toy().to("meta")
    inject(direct, config(), generator=seeded())
    generator = seeded()
    inject(deferred, config(), generator=generator)
    assert all(parameter.is_meta for parameter in deferred.parameters())
    with pytest.raises(LoraError, match="to_empty"):
        reset_adapters(deferred, generator)
    deferred.to_empty(device="cpu")
    reset_adapters(deferred, generator)
    assert states_equal(adapter_state(direct), adapter_state(deferred))


def test_reset_gives_the_start_values_again(
    toy: nn.Module, perturb: Callable[[nn.Module], None]
) -> None:
    inject(toy, config(), generator=seeded())
    start = {key: tensor.clone() for key, tensor in adapter_state(toy).items()}
    perturb(toy)
    assert not states_equal(adapter_state(toy), start)
    reset_adapters(toy, seeded())
    assert states_equal(adapter_state(toy), start)


def test_patterns_reach_the_layers(toy: nn.Module) -> None:
    inject(
        toy,
        config(rank_pattern={"^proj_out": 2}, alpha_pattern={"to_out.0": 16, "^proj_out": 5}),
        generator=seeded(),
    )
    found = adapters(toy)
    assert (found["proj_out"].rank, found["proj_out"].scale) == (2, 2.5)
    assert found["refiner.proj_out"].scale == 2.0
    assert found["blocks.1.attn.to_out.0"].scale == 4.0
    assert found["proj_out"].A.shape == (2, 8)


@pytest.mark.parametrize("field", ["rank_pattern", "alpha_pattern"])
def test_pattern_key_that_matches_no_layer_is_an_error_with_near_names(
    toy: nn.Module, field: str
) -> None:
    before = str(toy)
    with pytest.raises(LoraError, match=rf'"blocks.9.attn.to_q" \({field}\).*blocks.0.attn.to_q'):
        inject(toy, config(**{field: {"blocks.9.attn.to_q": 2}}), generator=seeded())
    with pytest.raises(LoraError, match=rf'"to_k" \({field}\)'):  # exists, but is not adapted
        inject(toy, config(**{field: {"to_k": 2}}), generator=seeded())
    assert str(toy) == before


def test_pattern_key_behind_an_earlier_one_warns(toy: nn.Module) -> None:
    with pytest.warns(UserWarning, match='rank_pattern key "blocks.0.attn.to_q" decides nothing'):
        inject(toy, config(rank_pattern={"to_q": 6, "blocks.0.attn.to_q": 2}), generator=seeded())
    assert adapters(toy)["blocks.0.attn.to_q"].rank == 6


def test_second_injection_is_refused(toy: nn.Module) -> None:
    inject(toy, config(), generator=seeded())
    with pytest.raises(LoraError, match="already has adapters"):
        inject(toy, config(target_modules=("to_k",)), generator=seeded())


def test_training_mode_of_the_linear_is_kept(toy: nn.Module) -> None:
    inject(toy.eval(), config(dropout=0.5), generator=seeded())
    assert not any(layer.training for layer in lora_layers(toy).values())


def test_injection_inside_a_checkpoint_wrapper_uses_plain_names() -> None:
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

    inner = nn.ModuleDict({"to_q": nn.Linear(3, 3)})
    model = nn.ModuleDict({"block": checkpoint_wrapper(inner)})
    assert inject(model, config(target_modules=("to_q",)), generator=seeded()) == ("block.to_q",)
    assert list(adapter_state(model)) == ["block.to_q.lora_A.weight", "block.to_q.lora_B.weight"]


def test_generator_on_another_device_is_refused(toy: nn.Module) -> None:
    class OtherDevice:
        device = torch.device("cuda")

    with pytest.raises(LoraError, match=r'torch\.Generator\("cpu"\)'):
        inject(toy, config(), generator=OtherDevice())  # type: ignore[arg-type]


def test_adapter_off_is_the_base_model(
    make_toy: Callable[..., nn.Module],
    toy_inputs: dict[str, torch.Tensor],
    perturb: Callable[[nn.Module], None],
) -> None:
    base, model = make_toy().requires_grad_(False), make_toy()
    inject(model, config(), generator=seeded())
    perturb(model)
    trained = model(**toy_inputs)
    with adapter_off(model):
        assert torch.equal(model(**toy_inputs), base(**toy_inputs))
        with adapter_off(model):
            assert torch.equal(model(**toy_inputs), base(**toy_inputs))
        assert torch.equal(model(**toy_inputs), base(**toy_inputs))
    assert torch.equal(model(**toy_inputs), trained)
    assert not torch.allclose(trained, base(**toy_inputs))


def test_adapter_off_restores_after_an_exception(toy: nn.Module) -> None:
    inject(toy, config(), generator=seeded())
    with pytest.raises(RuntimeError, match="inside"), adapter_off(toy):
        raise RuntimeError("inside")
    assert {layer.active for layer in lora_layers(toy).values()} == {("default",)}


def test_adapter_off_without_adapters_is_an_error(toy: nn.Module) -> None:
    with pytest.raises(LoraError, match="no adapters"), adapter_off(toy):
        pass
    with pytest.raises(LoraError, match="no adapters"):
        reset_adapters(toy, seeded())


def test_adapter_off_covers_a_submodule_only(toy: nn.Module) -> None:
    inject(toy, config(), generator=seeded())
    with adapter_off(toy.blocks[0]):
        assert toy.blocks[0].attn.to_q.active == ()
        assert toy.proj_out.active == ("default",)
        assert isinstance(toy.proj_out, LoraLinear)


def test_every_adapter_trains(
    toy: nn.Module, toy_inputs: dict[str, torch.Tensor], perturb: Callable[[nn.Module], None]
) -> None:
    inject(toy, config(target_modules="all-linear"), generator=seeded())
    perturb(toy)
    toy(**toy_inputs).square().sum().backward()
    for name, parameter in toy.named_parameters():
        if parameter.requires_grad:
            assert torch.count_nonzero(parameter.grad) > 0, name
        else:
            assert parameter.grad is None, name

"""Trained biases and saved modules: what trains, what computes, what is stored, what is merged."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from drl.lora import (
    LoraConfig,
    LoraError,
    active_adapter,
    adapter_off,
    adapter_state,
    base_names,
    inject,
    load_adapter_state,
    load_peft,
    merged_state,
    read_peft,
    remove_adapter,
    reset_adapters,
    save_peft,
    seed_saved_modules,
)

Make = Callable[..., nn.Module]
Train = Callable[[nn.Module], None]
Inputs = dict[str, torch.Tensor]


def config(**changes: Any) -> LoraConfig:
    return LoraConfig(**{"rank": 4, "alpha": 6, "target_modules": ("to_q", "to_k"), **changes})


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


SAVED = ("refiner.proj_out", "label_emb", "lora_head")
VARIANTS = {
    "all": config(bias="all"),
    "lora_only": config(bias="lora_only"),
    "saved": config(modules_to_save=SAVED),
    "saved_and_all": config(modules_to_save=SAVED, bias="all"),
    "whole_part": config(target_modules=("to_q",), modules_to_save=("ff",)),
}


@pytest.fixture(params=VARIANTS)
def variant(request: pytest.FixtureRequest) -> LoraConfig:
    return VARIANTS[request.param]


@pytest.fixture
def trained(toy: nn.Module, variant: LoraConfig, train_a_little: Train) -> nn.Module:
    inject(toy, variant, generator=seeded())
    train_a_little(toy)
    return toy


def keys(module: nn.Module) -> set[str]:
    return {key for key in adapter_state(module) if ".lora_A." not in key and ".lora_B." not in key}


def test_bias_all_trains_every_bias_of_the_model(toy: nn.Module) -> None:
    biased = [name for name in toy.state_dict() if name.endswith(".bias")]
    inject(toy, config(bias="all"), generator=seeded())
    adapted = {f"blocks.{i}.attn.to_q" for i in range(3)}  # to_k has none
    expected = {
        name.replace(".bias", ".base_layer.bias") if name.removesuffix(".bias") in adapted else name
        for name in biased
    }
    assert keys(toy) == expected
    assert len(expected) == 3 * 4 + 5


def test_bias_lora_only_trains_the_biases_of_adapted_layers(toy: nn.Module) -> None:
    inject(toy, config(bias="lora_only"), generator=seeded())
    assert keys(toy) == {f"blocks.{i}.attn.to_q.base_layer.bias" for i in range(3)}


def test_saved_modules_are_stored_under_their_plain_names(toy: nn.Module) -> None:
    inject(toy, config(modules_to_save=SAVED, bias="all"), generator=seeded())
    saved = {key for key in keys(toy) if key.startswith(SAVED)}
    linears = {f"{m}.{p}" for m in ("refiner.proj_out", "lora_head") for p in ("weight", "bias")}
    assert saved == {*linears, "label_emb.weight"}


def test_fresh_copies_change_nothing(
    toy: nn.Module, variant: LoraConfig, toy_inputs: Inputs
) -> None:
    before = toy.requires_grad_(False)(**toy_inputs)
    inject(toy, variant, generator=seeded())
    torch.testing.assert_close(toy(**toy_inputs), before, rtol=1e-6, atol=1e-6)


def test_everything_that_is_stored_trains_and_nothing_else(
    trained: nn.Module, toy_inputs: Inputs
) -> None:
    trained(**toy_inputs).square().sum().backward()
    with_gradient = {name for name, p in trained.named_parameters() if p.grad is not None}
    trainable = {name for name, p in trained.named_parameters() if p.requires_grad}
    assert with_gradient == trainable
    assert len(trainable) == len(adapter_state(trained))
    assert not any(".base_layer." in name or "original_module" in name for name in trainable)


def test_off_is_the_base_model_bit_for_bit(
    trained: nn.Module, make_toy: Make, toy_inputs: Inputs
) -> None:
    on = trained(**toy_inputs)
    with adapter_off(trained):
        assert torch.equal(trained(**toy_inputs), make_toy().requires_grad_(False)(**toy_inputs))
    assert torch.equal(trained(**toy_inputs), on)
    assert not torch.allclose(on, make_toy()(**toy_inputs))


def test_merged_state_computes_the_same(
    trained: nn.Module, make_toy: Make, toy_inputs: Inputs
) -> None:
    plain, state = make_toy(), dict(merged_state(trained))
    assert list(state) == list(plain.state_dict()) == list(base_names(trained).values())
    plain.load_state_dict(state, strict=True)
    torch.testing.assert_close(plain(**toy_inputs), trained(**toy_inputs), rtol=1e-4, atol=1e-5)
    with adapter_off(trained):
        for name, tensor in merged_state(trained):
            assert torch.equal(tensor, make_toy().state_dict()[name])


def test_state_round_trip_through_a_directory(
    trained: nn.Module, variant: LoraConfig, make_toy: Make, toy_inputs: Inputs, tmp_path: Path
) -> None:
    save_peft(trained, tmp_path / "a", variant, base_model=None)
    read, state = read_peft(tmp_path / "a")
    assert set(read.modules_to_save) == set(variant.modules_to_save)
    assert (read.bias, set(state)) == (variant.bias, set(adapter_state(trained)))
    fresh = make_toy()
    load_peft(fresh, tmp_path / "a")
    assert torch.equal(fresh(**toy_inputs), trained(**toy_inputs))
    injected = make_toy()
    inject(injected, variant, generator=seeded(4))
    load_peft(injected, tmp_path / "a")
    assert torch.equal(injected(**toy_inputs), trained(**toy_inputs))


def test_removing_leaves_the_base_model(
    trained: nn.Module, make_toy: Make, toy_inputs: Inputs
) -> None:
    remove_adapter(trained, "default")
    assert str(trained) == str(make_toy())
    assert torch.equal(trained(**toy_inputs), make_toy().requires_grad_(False)(**toy_inputs))


def test_model_built_on_the_meta_device_is_seeded_from_the_base(
    variant: LoraConfig, make_toy: Make, toy_inputs: Inputs
) -> None:
    direct, late = make_toy(), make_toy().to("meta")
    inject(direct, variant, generator=seeded(6))
    inject(late, variant, generator=seeded(6))
    assert all(parameter.is_meta for parameter in late.parameters())
    late.to_empty(device="cpu")
    with torch.no_grad():
        for parameter in late.parameters():
            parameter.fill_(float("nan"))  # what to_empty leaves behind is garbage
        base = make_toy().state_dict()
        for live, plain in base_names(late).items():
            late.state_dict()[live].copy_(base[plain])
    reset_adapters(late, seeded(6))
    seed_saved_modules(late)
    for key, tensor in adapter_state(late).items():
        assert torch.equal(tensor, adapter_state(direct)[key]), key
    assert torch.equal(late(**toy_inputs), direct(**toy_inputs))


def test_seeding_does_not_touch_matrices(toy: nn.Module, train_a_little: Train) -> None:
    inject(toy, config(modules_to_save=("lora_head",), bias="all"), generator=seeded())
    train_a_little(toy)
    before = {key: tensor.clone() for key, tensor in adapter_state(toy).items()}
    seed_saved_modules(toy)
    after = adapter_state(toy)
    changed = {key for key in before if not torch.equal(before[key], after[key])}
    assert changed == keys(toy)


def test_biases_and_copies_switch_with_their_adapter(
    toy: nn.Module, make_toy: Make, toy_inputs: Inputs, train_a_little: Train
) -> None:
    plans = {"one": VARIANTS["saved_and_all"], "two": VARIANTS["all"], "three": VARIANTS["saved"]}
    for number, (name, plan) in enumerate(plans.items()):
        inject(toy, plan, generator=seeded(number), name=name)
        train_a_little(toy)
    outputs = []
    for name, plan in plans.items():
        alone = make_toy()
        inject(alone, plan, generator=seeded())
        load_adapter_state(alone, adapter_state(toy, name))
        with active_adapter(toy, name):
            outputs.append(toy(**toy_inputs))
            # F.linear takes another kernel for weights that train, an ulp apart
            torch.testing.assert_close(outputs[-1], alone(**toy_inputs), rtol=1e-5, atol=1e-6)
            for key, tensor in merged_state(toy):
                assert torch.equal(tensor, dict(merged_state(alone))[key])
    assert not torch.allclose(outputs[0], outputs[1])
    with adapter_off(toy):
        assert torch.equal(toy(**toy_inputs), make_toy().requires_grad_(False)(**toy_inputs))
    for name in plans:
        remove_adapter(toy, name)
    assert str(toy) == str(make_toy())


def test_two_adapters_cannot_both_bring_their_own_bias(toy: nn.Module) -> None:
    inject(toy, VARIANTS["all"], generator=seeded())
    inject(toy, VARIANTS["lora_only"], generator=seeded(), name="old", trainable=False)
    with (
        pytest.raises(
            LoraError, match=r"default, old bring their own values of blocks.0.attn.to_q"
        ),
        active_adapter(toy, "default", "old"),
    ):
        pass


def test_a_saved_module_called_lora_is_no_adapter_tensor(
    make_toy: Make, toy_inputs: Inputs, train_a_little: Train, tmp_path: Path
) -> None:
    def make() -> nn.Module:
        model = make_toy()
        model.lora_A = nn.Linear(8, 8)  # named as a matrix, the worst case
        model.lora_A.load_state_dict(model.proj_out.state_dict())
        return model

    names = config(modules_to_save=("lora_A", "lora_head"))
    model = make()
    inject(model, names, generator=seeded())
    train_a_little(model)
    save_peft(model, tmp_path / "a", names, base_model=None)
    stored = load_file(tmp_path / "a" / "adapter_model.safetensors")
    assert {k for k in stored if "lora_A.bias" in k} == {"base_model.model.lora_A.bias"}
    again = make()
    load_peft(again, tmp_path / "a")
    assert torch.equal(again(**toy_inputs), model(**toy_inputs))
    assert torch.equal(
        again.lora_A.modules_to_save["default"].weight,
        model.lora_A.modules_to_save["default"].weight,
    )


@pytest.mark.parametrize(
    ("changes", "word"),
    [
        ({"modules_to_save": ("lora_hat",)}, r'"lora_hat" \(modules_to_save\).*near names: .*lora'),
        ({"modules_to_save": ("blocks",), "target_modules": ("proj_out",)}, "a ModuleList"),
        ({"modules_to_save": ("out",)}, r'"out" \(modules_to_save\)'),
        ({"modules_to_save": ("to_q", "to_k")}, "no module matched"),
        ({"modules_to_save": "proj_("}, "regular expression"),
        ({"modules_to_save": [3]}, "modules_to_save"),
        ({"bias": "some"}, "bias is 'some'"),
        ({"bias": None}, "bias is None"),
    ],
)
def test_settings_that_cannot_be_meant_are_refused(
    toy: nn.Module, changes: dict[str, Any], word: str
) -> None:
    before = str(toy)
    with pytest.raises(LoraError, match=word):
        inject(toy, config(**changes), generator=seeded())
    assert str(toy) == before


def test_a_name_that_peft_would_take_as_text_is_refused(toy: nn.Module) -> None:
    toy.my_lora_head = nn.Linear(2, 2)
    with pytest.raises(LoraError, match="also ends the path my_lora_head, which PEFT would save"):
        inject(toy, config(modules_to_save=("lora_head",)), generator=seeded())


def test_saving_a_module_that_another_adapter_is_in_is_refused(toy: nn.Module) -> None:
    inject(toy, config(target_modules=("net.2",)), generator=seeded())
    with pytest.raises(LoraError, match="another adapter lives"):
        inject(toy, config(modules_to_save=("ff",)), generator=seeded(), name="b")


def test_a_layer_may_be_adapted_by_one_adapter_and_saved_by_another(
    toy: nn.Module, make_toy: Make, toy_inputs: Inputs, train_a_little: Train
) -> None:
    plans = {"x": config(target_modules=("net.2",)), "y": config(modules_to_save=("net.2",))}
    for name, plan in plans.items():
        inject(toy, plan, generator=seeded(), name=name)
        train_a_little(toy)
    for name, plan in plans.items():
        alone = make_toy()
        inject(alone, plan, generator=seeded())
        load_adapter_state(alone, adapter_state(toy, name))
        with active_adapter(toy, name):
            assert torch.equal(toy(**toy_inputs), alone(**toy_inputs))
            assert list(dict(merged_state(toy))) == list(make_toy().state_dict())


def test_adapting_inside_a_module_that_another_adapter_saves(
    toy: nn.Module, make_toy: Make, toy_inputs: Inputs, train_a_little: Train
) -> None:
    inject(toy, config(modules_to_save=("ff",)), generator=seeded(1))
    train_a_little(toy)
    inject(toy, config(target_modules=("net.2",)), generator=seeded(2), name="b")
    train_a_little(toy)
    alone = make_toy()
    inject(alone, config(target_modules=("net.2",)), generator=seeded(2))
    load_adapter_state(alone, adapter_state(toy, "b"))
    assert torch.equal(toy(**toy_inputs), alone(**toy_inputs))
    assert list(base_names(toy).values()) == list(make_toy().state_dict())
    seed_saved_modules(toy)
    copy = toy.blocks[0].ff.modules_to_save["default"]
    assert torch.equal(copy.net[2].weight, make_toy().blocks[0].ff.net[2].weight)


def test_a_norm_bias_and_a_custom_module_keep_their_attributes() -> None:
    model = nn.ModuleDict({"norm": nn.LayerNorm(4), "q": nn.Linear(4, 4)})
    inject(model, config(target_modules=("q",), bias="all"), generator=seeded())
    norm = model["norm"]
    assert norm.normalized_shape == (4,)
    assert norm.weight is norm.base_layer.weight
    assert norm.bias is norm.lora_bias["default"]
    with adapter_off(model):
        assert norm.bias is norm.base_layer.bias
    with pytest.raises(AttributeError, match="nothing_like_it"):
        _ = norm.nothing_like_it


def test_a_bias_of_the_model_itself_is_refused() -> None:
    model = nn.ModuleDict({"q": nn.Linear(4, 4)})
    model.register_parameter("bias", nn.Parameter(torch.zeros(1)))
    with pytest.raises(LoraError, match="lora_only"):
        inject(model, config(target_modules=("q",), bias="all"), generator=seeded())

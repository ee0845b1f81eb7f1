"""Adapter states and strict loading."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

from drl.lora import LoraConfig, LoraError, adapter_state, adapters, inject, load_adapter_state

CONFIG = LoraConfig(rank=4, alpha=6, target_modules=("to_q", "proj_out"))
KEY = "blocks.1.attn.to_q.lora_B.weight"


@pytest.fixture
def adapted(toy: nn.Module, perturb: Callable[[nn.Module], None]) -> nn.Module:
    inject(toy, CONFIG, generator=torch.Generator().manual_seed(0))
    perturb(toy)
    return toy


def cloned(module: nn.Module) -> dict[str, torch.Tensor]:
    return {key: tensor.clone() for key, tensor in adapter_state(module).items()}


def test_adapters_lists_live_parameters_with_their_strength(adapted: nn.Module) -> None:
    found = adapters(adapted)["blocks.1.attn.to_q"]
    assert (found.rank, found.alpha, found.scale) == (4, 6, 1.5)
    assert found.A is adapted.blocks[1].attn.to_q.lora_A["default"].weight
    assert found.B.requires_grad


def test_state_keys_are_plain_and_detached(adapted: nn.Module) -> None:
    state = adapter_state(adapted)
    assert len(state) == 10
    assert state[KEY].shape == (8, 4)
    assert not state[KEY].requires_grad


def test_state_of_a_module_without_adapters_is_an_error(toy: nn.Module) -> None:
    with pytest.raises(LoraError, match="no adapters"):
        adapter_state(toy)


def test_state_round_trip(adapted: nn.Module, make_toy: Callable[..., nn.Module]) -> None:
    other = make_toy()
    inject(other, CONFIG, generator=torch.Generator().manual_seed(9))
    load_adapter_state(other, adapter_state(adapted))
    for key, tensor in adapter_state(other).items():
        assert torch.equal(tensor, adapter_state(adapted)[key])


def test_loading_casts_to_the_adapter_dtype(adapted: nn.Module) -> None:
    half = {key: tensor.bfloat16() for key, tensor in cloned(adapted).items()}
    load_adapter_state(adapted, half)
    assert adapter_state(adapted)[KEY].dtype == torch.float32
    assert torch.equal(adapter_state(adapted)[KEY], half[KEY].float())


def with_value(tensor: torch.Tensor, value: float) -> torch.Tensor:
    changed = tensor.clone()
    changed[1, 2] = value
    return changed


def renamed(state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {"base_model.model." + key: tensor for key, tensor in state.items()}


@pytest.mark.parametrize(
    ("breakage", "words"),
    [
        (lambda s: {k: v for k, v in s.items() if k != KEY}, ("missing keys", KEY)),
        (lambda s: {**s, "to_z.lora_A.weight": s[KEY]}, ("unexpected keys", "to_z.lora_A.weight")),
        (renamed, ("missing keys", "unexpected keys", "base_model.model.")),
        (lambda s: {}, ("missing keys", "and 2 more")),
        (lambda s: {**s, KEY: s[KEY].T}, (KEY, "[4, 8]", "[8, 4]")),
        (lambda s: {**s, KEY: with_value(s[KEY], torch.nan)}, ("non-finite", KEY)),
        (lambda s: {**s, KEY: with_value(s[KEY], -torch.inf)}, ("non-finite", KEY)),
        (lambda s: {**s, KEY: s[KEY].to(torch.int8)}, (KEY, "torch.int8", "floating")),
        (lambda s: {**s, KEY: s[KEY].to(torch.complex64)}, (KEY, "floating")),
        (lambda s: {**s, KEY: s[KEY].to("meta")}, (KEY, "meta")),
    ],
)
def test_unfit_state_is_refused_by_name_before_any_change(
    adapted: nn.Module,
    breakage: Callable[[dict[str, torch.Tensor]], dict[str, torch.Tensor]],
    words: tuple[str, ...],
) -> None:
    before = cloned(adapted)
    state = {key: tensor + 1 for key, tensor in before.items()}
    with pytest.raises(LoraError) as caught:
        load_adapter_state(adapted, breakage(state))
    for word in words:
        assert word in str(caught.value)
    for key, tensor in adapter_state(adapted).items():
        assert torch.equal(tensor, before[key])


def test_loading_into_meta_adapters_is_refused(
    adapted: nn.Module, make_toy: Callable[..., nn.Module]
) -> None:
    empty = make_toy().to("meta")
    inject(empty, CONFIG, generator=torch.Generator())
    with pytest.raises(LoraError, match="to_empty"):
        load_adapter_state(empty, adapter_state(adapted))

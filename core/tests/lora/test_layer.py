"""Forward and gradients against the closed forms of lora.md 2.1 and 2.2."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

from drl.lora import LoraConfig, LoraLinear, adapter_off, inject
from drl.lora.layer import AdapterSettings


def make_layer(
    dtype: torch.dtype = torch.float32, base_dtype: torch.dtype = torch.float32, **changes: Any
) -> LoraLinear:
    generator = torch.Generator().manual_seed(1)
    base = nn.Linear(6, 5, device="meta").to_empty(device="cpu").to(base_dtype)
    settings = {"rank": 3, "alpha": 4.5, "scale": 1.5, **changes}
    layer = LoraLinear(base)
    layer.add("default", AdapterSettings(**settings), dtype)
    layer.active = ("default",)
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator))
    layer.base_layer.requires_grad_(False)
    return layer


def rows(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(2))


def test_forward_by_hand() -> None:
    base = nn.Linear(2, 2)
    layer = LoraLinear(base)
    layer.add("default", AdapterSettings(rank=1, alpha=3, scale=3.0), torch.float32)
    layer.active = ("default",)
    with torch.no_grad():
        base.weight.copy_(torch.tensor([[1.0, 2.0], [3.0, 4.0]]))
        base.bias.copy_(torch.tensor([10.0, 20.0]))
        layer.down.copy_(torch.tensor([[1.0, -1.0]]))
        layer.up.copy_(torch.tensor([[2.0], [5.0]]))
    # W x + b = [15, 31]; A x = -1; 3 * B A x = [-6, -15]
    assert torch.equal(layer(torch.tensor([1.0, 2.0])), torch.tensor([9.0, 16.0]))


def test_forward_is_base_plus_scaled_low_rank_update() -> None:
    layer, x = make_layer(), rows(2, 7, 6)
    W = layer.base_layer.weight + 1.5 * layer.up @ layer.down
    expected = x @ W.T + layer.base_layer.bias
    torch.testing.assert_close(layer(x), expected, rtol=1e-5, atol=1e-5)


def test_gradients_match_the_closed_forms() -> None:
    layer = make_layer(torch.float64, torch.float64)
    x = rows(7, 6).double().requires_grad_()
    G = rows(7, 5).double()
    layer(x).backward(G)
    A, B, W, s = layer.down.detach(), layer.up.detach(), layer.base_layer.weight, 1.5
    P = x.detach() @ A.T
    dP = s * G @ B
    torch.testing.assert_close(layer.up.grad, s * G.T @ P)
    torch.testing.assert_close(layer.down.grad, dP.T @ x.detach())
    torch.testing.assert_close(x.grad, G @ W + dP @ A)
    assert layer.base_layer.weight.grad is None


def test_gradient_of_a_is_zero_while_b_is_zero() -> None:
    layer, x = make_layer(), rows(7, 6)
    with torch.no_grad():
        layer.up.zero_()
    layer(x).sum().backward()
    assert torch.count_nonzero(layer.down.grad) == 0
    assert torch.count_nonzero(layer.up.grad) > 0


def test_dropout_acts_on_the_adapter_input_in_training_only() -> None:
    layer, x = make_layer(dropout=0.5), rows(50, 6)
    full = layer.eval()(x)
    torch.manual_seed(3)
    dropped = layer.train()(x)
    torch.manual_seed(3)
    masked = nn.functional.dropout(x, 0.5)
    expected = layer.base_layer(x) + 1.5 * (masked @ layer.down.T @ layer.up.T)
    torch.testing.assert_close(dropped, expected, rtol=1e-5, atol=1e-5)
    assert not torch.allclose(dropped, full)


@pytest.mark.parametrize("base_dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_zero_b_gives_the_base_output_bit_for_bit(
    base_dtype: torch.dtype, dtype: torch.dtype
) -> None:
    layer, x = make_layer(dtype, base_dtype), rows(64, 6).to(base_dtype)
    with torch.no_grad():
        layer.up.zero_()
    bits = torch.int32 if base_dtype is torch.float32 else torch.int16
    assert torch.equal(layer(x).view(bits), layer.base_layer(x).view(bits))


def test_float32_adapter_over_bfloat16_base_computes_the_delta_in_float32() -> None:
    layer, x = make_layer(torch.float32, torch.bfloat16), rows(64, 6).bfloat16()
    y = layer(x)
    delta = (x.float() @ layer.down.T * 1.5) @ layer.up.T
    assert y.dtype == torch.bfloat16
    assert torch.equal(y, layer.base_layer(x) + delta.bfloat16())


def test_autocast_decides_the_compute_dtype() -> None:
    layer, x = make_layer(), rows(7, 6)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y = layer(x.bfloat16())
    assert y.dtype == torch.bfloat16
    y.float().sum().backward()
    assert layer.up.grad is not None
    assert layer.up.grad.dtype == torch.float32


def test_base_attributes_are_visible_on_the_wrapper() -> None:
    layer = make_layer(base_dtype=torch.bfloat16)
    assert layer.weight is layer.base_layer.weight
    assert layer.bias is layer.base_layer.bias
    assert (layer.in_features, layer.out_features) == (6, 5)
    assert layer.weight.dtype == torch.bfloat16


def test_scale_is_no_buffer_and_survives_to_empty_and_deepcopy() -> None:
    layer = make_layer()
    assert [name for name, _ in layer.named_buffers()] == []
    assert (
        copy.deepcopy(layer).to(torch.bfloat16).to_empty(device="cpu").settings["default"].scale
        == 1.5
    )


def test_meta_forward_works_for_shape_probing() -> None:
    base = nn.Linear(6, 5, device="meta")
    layer = LoraLinear(base)
    layer.add("default", AdapterSettings(rank=2, alpha=2, scale=1.0), torch.float32)
    layer.active = ("default",)
    assert layer(torch.empty(3, 6, device="meta")).shape == (3, 5)


def test_gradients_reach_the_adapter_under_checkpointing() -> None:
    layer, x = make_layer(), rows(7, 6)
    y = torch.utils.checkpoint.checkpoint(layer, x, use_reentrant=False)
    y.sum().backward()
    assert torch.count_nonzero(layer.up.grad) > 0


def test_compiled_layer_follows_adapter_off() -> None:
    model, x = nn.Sequential(make_layer()), rows(7, 6)
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    assert torch.equal(compiled(x), model(x))
    with adapter_off(compiled):
        assert torch.equal(compiled(x), model[0].base_layer(x))
    assert torch.equal(compiled(x), model(x))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("autocast", [False, True])
def test_an_adapted_layer_compiles_into_one_graph(dtype: torch.dtype, autocast: bool) -> None:
    """A graph that breaks at each adapter costs more time than the adapters' own arithmetic."""
    model = nn.Sequential(nn.Linear(4, 6, dtype=torch.bfloat16))
    config = LoraConfig(rank=2, alpha=4, target_modules=("0",))
    inject(model, config, generator=torch.Generator().manual_seed(0), dtype=dtype)
    x = torch.randn(3, 4, generator=torch.Generator().manual_seed(1)).to(torch.bfloat16)
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        expected = model(x)
        compiled = torch.compile(model, fullgraph=True, backend="eager")
        assert torch.equal(compiled(x), expected)

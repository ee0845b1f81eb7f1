"""Convolutions and embeddings: the update is that of a weight W + scale * (B A), in any shape."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.func import functional_call
from torch.nn import functional as F

from drl.lora import LoraConfig, LoraError, LoraLayer, adapters, inject, lora_layers, merged_state


def config(**changes: Any) -> LoraConfig:
    return LoraConfig(**{"rank": 3, "alpha": 4.5, "target_modules": ("layer",), **changes})


BASES: dict[str, tuple[nn.Module, tuple[int, ...]]] = {
    "linear": (nn.Linear(6, 5), (4, 6)),
    "conv1d": (nn.Conv1d(4, 5, 3, stride=2, padding=1), (2, 4, 9)),
    "conv2d": (nn.Conv2d(4, 5, (3, 2), padding=(1, 0), bias=False), (2, 4, 6, 7)),
    "patches": (nn.Conv2d(4, 8, 2, stride=2), (2, 4, 6, 6)),
    "same": (nn.Conv2d(4, 5, 3, padding="same"), (2, 4, 5, 5)),
    "conv3d": (nn.Conv3d(4, 5, (1, 2, 2), stride=(1, 2, 2)), (2, 4, 3, 4, 4)),
    "embedding": (nn.Embedding(7, 5, padding_idx=2), (2, 6)),
}


def make(kind: str, dtype: torch.dtype = torch.float64) -> tuple[nn.Module, torch.Tensor]:
    """A model with one layer, its adapter filled with noise, and an input."""
    base, shape = BASES[kind]
    generator = torch.Generator().manual_seed(3)
    model = nn.ModuleDict({"layer": type(base)(**arguments(base))}).to(dtype)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator))
    inject(model, config(), generator=generator, dtype=dtype)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.copy_(torch.randn(parameter.shape, generator=generator))
    if kind == "embedding":
        with torch.no_grad():
            model["layer"].factors("default")[0][:, 2] = 0  # the padding row starts so and stays so
        return model, torch.randint(0, 7, shape, generator=generator)
    return model, torch.randn(shape, generator=generator).to(dtype)


def arguments(base: nn.Module) -> dict[str, Any]:
    if isinstance(base, nn.Linear):
        return {"in_features": base.in_features, "out_features": base.out_features}
    if isinstance(base, nn.Embedding):
        names = ("num_embeddings", "embedding_dim", "padding_idx")
    else:
        names = ("in_channels", "out_channels", "kernel_size", "stride", "padding")
    found = {name: getattr(base, name) for name in names}
    return found if isinstance(base, nn.Embedding) else {**found, "bias": base.bias is not None}


def dense_delta(kind: str, A: torch.Tensor, B: torch.Tensor, shape: torch.Size) -> torch.Tensor:
    """scale * sum over the rank, written out with einsum."""
    if kind == "embedding":
        return 1.5 * torch.einsum("rv,dr->vd", A, B)
    return 1.5 * torch.einsum("rk,or->ok", A.flatten(1), B.flatten(1)).reshape(shape)


@pytest.mark.parametrize("kind", BASES)
def test_forward_and_gradients_are_those_of_the_dense_weight(kind: str) -> None:
    model, x = make(kind)
    layer = model["layer"]
    A, B = (factor.detach().clone().requires_grad_() for factor in layer.factors("default"))
    base = layer.base_layer
    W = base.weight.detach() + dense_delta(kind, A, B, base.weight.shape)
    expected = functional_call(base, {"weight": W}, (x,))
    output = layer(x)
    G = torch.randn(output.shape, generator=torch.Generator().manual_seed(5)).double()
    output.backward(G)
    torch.testing.assert_close(output, expected)
    expected.backward(G)
    for ours, reference in zip(layer.factors("default"), (A, B), strict=True):
        torch.testing.assert_close(ours.grad, reference.grad)
    assert base.weight.grad is None


@pytest.mark.parametrize("kind", BASES)
def test_merged_weight_is_the_dense_weight(kind: str) -> None:
    model, x = make(kind, torch.float32)
    layer = model["layer"]
    A, B = (factor.detach() for factor in layer.factors("default"))
    expected = layer.weight + dense_delta(kind, A, B, layer.weight.shape)
    state = dict(merged_state(model))
    assert next(iter(state)) == "layer.weight"
    torch.testing.assert_close(state["layer.weight"], expected, rtol=1e-6, atol=1e-5)
    plain = functional_call(layer.base_layer, {"weight": state["layer.weight"]}, (x,))
    torch.testing.assert_close(plain, layer(x), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("kind", BASES)
@pytest.mark.parametrize("init", ["gaussian", "kaiming-uniform", "orthogonal"])
def test_a_fresh_adapter_changes_nothing(kind: str, init: str) -> None:
    base, shape = BASES[kind]
    model = nn.ModuleDict({"layer": type(base)(**arguments(base))}).requires_grad_(False)
    x = torch.randint(0, 7, shape) if kind == "embedding" else torch.randn(shape)
    before = model["layer"](x)
    inject(model, config(rank=4, init=init), generator=torch.Generator().manual_seed(0))
    difference = (model["layer"](x) - before).abs().max()
    # orthogonal halves cancel up to rounding, a zero matrix exactly
    assert difference <= (1e-5 if init == "orthogonal" else 0.0)


def test_embedding_starts_with_zero_rows_and_normal_features() -> None:
    model = nn.ModuleDict({"layer": nn.Embedding(11, 4000)})
    inject(model, config(rank=8), generator=torch.Generator().manual_seed(0))
    A, B = model["layer"].factors("default")
    assert torch.count_nonzero(A) == 0
    assert B.std().item() == pytest.approx(1.0, rel=0.02)
    assert (A.shape, B.shape) == ((8, 11), (4000, 8))


def test_convolution_starts_with_its_fan_in_of_channels_times_kernel() -> None:
    model = nn.ModuleDict({"layer": nn.Conv2d(16, 8, 5)})
    changes = {"rank": 64, "init": "kaiming-uniform"}
    inject(model, config(**changes), generator=torch.Generator().manual_seed(0))
    A, B = model["layer"].factors("default")
    bound = 1 / (16 * 25) ** 0.5
    assert 0.99 * bound < A.abs().max() <= bound
    assert A.shape == (64, 16, 5, 5)
    assert B.shape == (8, 64, 1, 1)
    assert torch.count_nonzero(B) == 0


def test_padding_row_of_an_embedding_gets_no_gradient() -> None:
    model, _ = make("embedding")
    model["layer"](torch.tensor([[2, 2, 1]])).sum().backward()
    A, _ = model["layer"].factors("default")
    assert torch.count_nonzero(A.grad[:, 2]) == 0
    assert torch.count_nonzero(A.grad[:, 1]) > 0


@pytest.mark.parametrize(
    ("layer", "word"),
    [
        (nn.Conv2d(4, 4, 3, groups=2), "groups 1"),
        (nn.Conv2d(4, 4, 3, dilation=2), "dilation 1"),
        (nn.Conv2d(4, 4, 3, padding=1, padding_mode="reflect"), "zero padding"),
        (nn.Embedding(4, 4, max_norm=1.0), "max_norm"),
        (nn.ConvTranspose2d(4, 4, 3), "cannot be adapted: layer \\(ConvTranspose2d\\)"),
        (nn.LSTM(4, 4), "cannot be adapted: layer \\(LSTM\\)"),
    ],
)
def test_a_layer_whose_adapter_would_mean_something_else_is_refused(
    layer: nn.Module, word: str
) -> None:
    model = nn.ModuleDict({"layer": layer, "other": nn.Linear(4, 4)})
    before = str(model)
    with pytest.raises(LoraError, match=word):
        inject(model, config(target_modules=("other", "layer")), generator=torch.Generator())
    assert str(model) == before


def test_all_linear_leaves_convolutions_and_embeddings_alone(toy: nn.Module) -> None:
    inject(toy, config(target_modules="all-linear"), generator=torch.Generator())
    assert not isinstance(toy.conv_in, LoraLayer)
    assert not isinstance(toy.label_emb, LoraLayer)
    assert len(lora_layers(toy)) == 3 * 6 + 4


def test_attributes_that_models_read_are_the_base_layers() -> None:
    model, _ = make("patches")
    conv = model["layer"]
    assert (conv.in_channels, conv.out_channels, conv.kernel_size) == (4, 8, (2, 2))
    assert conv.weight is conv.base_layer.weight
    embedding = make("embedding")[0]["layer"]
    assert (embedding.num_embeddings, embedding.embedding_dim) == (7, 5)


def test_half_precision_base_under_a_float32_adapter() -> None:
    model = nn.ModuleDict({"layer": nn.Conv2d(4, 5, 3), "words": nn.Embedding(7, 5)}).bfloat16()
    targets = {"target_modules": ("layer", "words")}
    inject(model, config(**targets), generator=torch.Generator().manual_seed(0))
    assert {a.A.dtype for a in adapters(model).values()} == {torch.float32}
    assert model["layer"](torch.ones(1, 4, 5, 5).bfloat16()).dtype == torch.bfloat16
    assert model["words"](torch.tensor([1])).dtype == torch.bfloat16
    with torch.autocast("cpu", dtype=torch.bfloat16):
        output = model["layer"](torch.ones(1, 4, 5, 5).bfloat16())
    output.float().sum().backward()
    assert model["layer"].factors("default")[1].grad.dtype == torch.float32


@pytest.mark.parametrize("kind", BASES)
def test_no_rows_give_no_rows_and_a_zero_gradient(kind: str) -> None:
    model, x = make(kind)
    output = model["layer"](x[:0])
    assert output.shape[0] == 0
    output.sum().backward()
    assert all(torch.count_nonzero(f.grad) == 0 for f in model["layer"].factors("default"))


def test_three_dimensional_rows_equal_flat_rows() -> None:
    model, _ = make("linear")
    x = torch.randn(2, 3, 6, generator=torch.Generator().manual_seed(8)).double()
    whole = model["layer"](x)
    assert torch.allclose(whole.reshape(6, 5), model["layer"](x.reshape(6, 6)), atol=1e-12)
    assert F.mse_loss(whole[1, 2], model["layer"](x[1, 2])) < 1e-20

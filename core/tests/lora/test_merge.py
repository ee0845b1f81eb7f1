"""Merging: one rounding, untouched base, plain names."""

from __future__ import annotations

import hashlib
from collections.abc import Callable

import pytest
import torch
from torch import nn

from drl.lora import LoraConfig, LoraError, inject, lora_layers, merge_delta, merged_state

CONFIG = LoraConfig(rank=4, alpha=6, target_modules=("to_q", "to_out.0", "proj_out"))


def matrices(seed: int = 0) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    W = torch.randn(48, 32, generator=generator)
    A = torch.randn(8, 32, generator=generator) / 8
    B = torch.randn(48, 8, generator=generator) / 16
    return W, A, B


def digest(module: nn.Module) -> str:
    sha = hashlib.sha256()
    for name, tensor in module.state_dict().items():
        sha.update(name.encode())
        sha.update(tensor.contiguous().view(torch.uint8).numpy().tobytes())
    return sha.hexdigest()


def adapted_toy(
    make_toy: Callable[..., nn.Module], dtype: torch.dtype, **changes: int
) -> nn.Module:
    model = make_toy(**changes).to(dtype)
    inject(model, CONFIG, generator=torch.Generator().manual_seed(0))
    return model


def test_merge_by_hand() -> None:
    W = torch.tensor([[1.0, 2.0], [3.0, 4.0]])
    merged = merge_delta(W, torch.tensor([[1.0, -1.0]]), torch.tensor([[2.0], [0.5]]), 3.0)
    assert torch.equal(merged, torch.tensor([[7.0, -4.0], [4.5, 2.5]]))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_merge_is_one_rounding_of_the_exact_sum(dtype: torch.dtype) -> None:
    W, A, B = matrices()
    W = W.to(dtype)
    exact = W.double() + 1.5 * B.double() @ A.double()
    merged = merge_delta(W, A, B, 1.5)
    assert merged.dtype == dtype
    size = exact.abs().to(dtype)
    spacing = torch.nextafter(size, torch.full_like(size, torch.inf)).double() - size.double()
    assert ((merged.double() - exact).abs() <= 0.5001 * spacing).all()


def test_merge_rounds_less_than_a_bfloat16_delta_does() -> None:
    W, A, B = matrices()
    W = W.bfloat16()
    exact = W.double() + 1.5 * B.double() @ A.double()
    twice = W + (1.5 * (B @ A)).bfloat16()
    once = merge_delta(W, A, B, 1.5)
    assert (once.double() - exact).abs().mean() < (twice.double() - exact).abs().mean()


def test_half_precision_factors_are_multiplied_in_float32() -> None:
    W, A, B = matrices()
    A, B = A.bfloat16(), B.bfloat16()
    torch.testing.assert_close(
        merge_delta(W, A, B, 1.5), W + 1.5 * (B.float() @ A.float()), rtol=0, atol=1e-6
    )


def test_autocast_does_not_reach_the_merge() -> None:
    W, A, B = matrices()
    plain = merge_delta(W, A, B, 1.5)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(merge_delta(W, A, B, 1.5), plain)


def test_matmul_precision_of_the_process_is_restored() -> None:
    before = torch.get_float32_matmul_precision()
    try:
        torch.set_float32_matmul_precision("high")
        merge_delta(*matrices(), 1.5)
        assert torch.get_float32_matmul_precision() == "high"
        assert torch.backends.cuda.matmul.allow_tf32
    finally:
        torch.set_float32_matmul_precision(before)


def test_merge_leaves_its_arguments_alone() -> None:
    given, copies = matrices(), matrices()
    merge_delta(*given, 1.5)
    assert all(torch.equal(one, two) for one, two in zip(given, copies, strict=True))


def test_merged_state_loads_strictly_into_the_plain_model(
    make_toy: Callable[..., nn.Module],
    toy_inputs: dict[str, torch.Tensor],
    perturb: Callable[[nn.Module], None],
) -> None:
    model, plain = adapted_toy(make_toy, torch.float32), make_toy()
    perturb(model)
    state = dict(merged_state(model))
    assert list(state) == list(plain.state_dict())
    plain.load_state_dict(state, strict=True)
    torch.testing.assert_close(plain(**toy_inputs), model(**toy_inputs), rtol=1e-4, atol=1e-5)


def test_merged_state_includes_buffers_and_drops_only_adapters() -> None:
    model = nn.ModuleDict({"lora_A": nn.Linear(3, 3), "norm": nn.BatchNorm1d(3)})
    expected = list(model.state_dict())
    config = LoraConfig(rank=2, alpha=2, target_modules=("lora_A",))
    inject(model, config, generator=torch.Generator())
    assert [name for name, _ in merged_state(model)] == expected


def test_merged_state_without_adapters_is_the_plain_state(toy: nn.Module) -> None:
    state = toy.state_dict()
    for name, tensor in merged_state(toy):
        assert tensor.data_ptr() == state[name].data_ptr()


@pytest.mark.parametrize("trained", [False, True])
def test_thousand_merges_leave_the_base_byte_equal(
    make_toy: Callable[..., nn.Module], perturb: Callable[[nn.Module], None], trained: bool
) -> None:
    model = adapted_toy(make_toy, torch.bfloat16, blocks=1)
    if trained:
        perturb(model)
    before = digest(model)
    first = dict(merged_state(model))
    for _ in range(1000):
        last = dict(merged_state(model))
    assert digest(model) == before
    for name, tensor in first.items():
        assert torch.equal(tensor, last[name])


def test_merging_a_zero_adapter_gives_the_base_weights(make_toy: Callable[..., nn.Module]) -> None:
    base = make_toy().bfloat16()
    model = adapted_toy(make_toy, torch.bfloat16)
    for name, tensor in merged_state(model):
        assert torch.equal(tensor, base.state_dict()[name])


def test_one_merged_weight_at_a_time(make_toy: Callable[..., nn.Module]) -> None:
    model = adapted_toy(make_toy, torch.float32)
    stream = merged_state(model)
    calls: list[str] = []
    layer = lora_layers(model)["blocks.0.attn.to_q"]
    for name, _ in stream:
        calls.append(name)
        if name == "blocks.0.attn.to_k.weight":
            break
    assert calls[-2:] == ["blocks.0.attn.to_q.bias", "blocks.0.attn.to_k.weight"]
    # The rest is computed only when asked for: a change made now shows up later in the stream.
    with torch.no_grad():
        layer.up.fill_(1.0)
        lora_layers(model)["proj_out"].up.fill_(1.0)
    rest = dict(stream)
    assert not torch.equal(rest["proj_out.weight"], model.proj_out.base_layer.weight)


def test_target_tied_to_another_module_is_refused(toy: nn.Module) -> None:
    toy.refiner.proj_out.weight = toy.proj_out.weight
    config = LoraConfig(rank=2, alpha=2, target_modules="proj_out")
    inject(toy, config, generator=torch.Generator())
    with pytest.raises(LoraError, match=r"proj_out.weight is tied to refiner.proj_out.weight"):
        list(merged_state(toy))

"""Start schemes: PEFT's distributions, and the two that come from the base weight (lora.md 2.3)."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from drl.lora import (
    LoraConfig,
    LoraError,
    adapter_off,
    adapter_snapshot,
    adapters,
    inject,
    load_peft,
    lora_layers,
    merged_state,
    read_peft,
    reset_adapters,
    save_peft,
    write_peft,
)
from drl.lora.init import olora, orthogonal, pissa, random

Make = Callable[..., nn.Module]
Inputs = dict[str, torch.Tensor]
TARGETS = ("to_q", "net.0.proj", "proj_out")


def config(init: str, **changes: Any) -> LoraConfig:
    return LoraConfig(**{"rank": 4, "alpha": 6, "target_modules": TARGETS, "init": init, **changes})


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def weight(rows: int = 7, columns: int = 5) -> torch.Tensor:
    return torch.randn(rows, columns, generator=seeded(3))


def test_random_fills_both_matrices_as_a_linear() -> None:
    A, B = random(64, 400, 900, seeded())
    for matrix, fan_in in ((A, 400), (B, 64)):
        assert 0.99 / math.sqrt(fan_in) < matrix.abs().max() <= 1 / math.sqrt(fan_in)
    assert B.abs().min() < 1e-3


def test_orthogonal_halves_cancel_and_have_pefts_size() -> None:
    A, B = orthogonal(16, 500, 600, seeded())
    assert (A.shape, B.shape) == ((16, 500), (600, 16))
    assert (B @ A).abs().max() < 1e-6
    # rows of a random 8 x 16 orthonormal basis: each entry has variance 8/16 of the noise
    assert A.std().item() == pytest.approx(0.1 * math.sqrt(0.5), rel=0.03)
    assert B.std().item() == pytest.approx(0.1 * math.sqrt(0.5), rel=0.03)


def test_orthogonal_trains_both_matrices_from_the_first_step(toy: nn.Module) -> None:
    inject(toy, config("orthogonal"), generator=seeded())
    toy(x=torch.ones(1, 3, 4, 4), label=torch.tensor([1])).square().sum().backward()
    for tensors in adapters(toy).values():
        assert torch.count_nonzero(tensors.A.grad) > 0
        assert torch.count_nonzero(tensors.B.grad) > 0


@pytest.mark.parametrize("scale", [0.5, 1.0, 4.0])
def test_pissa_is_the_best_approximation_of_the_weight_at_any_scale(scale: float) -> None:
    W = weight()
    A, B = pissa(W, 3, scale)
    U, S, Vh = torch.linalg.svd(W)
    torch.testing.assert_close(scale * B @ A, U[:, :3] * S[:3] @ Vh[:3], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close((A @ A.T).diagonal(), S[:3] / scale, rtol=1e-5, atol=1e-5)


def test_olora_is_the_leading_part_of_the_qr_decomposition() -> None:
    W = weight()
    A, B = olora(W, 2, 3.0)
    torch.testing.assert_close(B.T @ B, torch.eye(2), rtol=0, atol=1e-6)
    torch.testing.assert_close(B @ A, B @ B.T @ W, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("init", ["pissa", "olora"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_start_from_the_base_changes_no_output_and_no_weight(
    make_toy: Make, toy_inputs: Inputs, init: str, dtype: torch.dtype
) -> None:
    base, model = make_toy().requires_grad_(False), make_toy()
    inject(model, config(init), generator=seeded(), dtype=dtype)
    assert all(torch.count_nonzero(a.B) > 0 for a in adapters(model).values())
    tolerance = 1e-5 if dtype is torch.float32 else 2e-2
    torch.testing.assert_close(model(**toy_inputs), base(**toy_inputs), rtol=0, atol=tolerance)
    with adapter_off(model):
        assert torch.equal(model(**toy_inputs), base(**toy_inputs))
    for fqn, layer in lora_layers(model).items():
        assert torch.equal(layer.weight, base.get_submodule(fqn).weight)
        start = [layer.lora_start["default"].A, layer.lora_start["default"].B]
        assert all(
            torch.equal(s, f.float()) for s, f in zip(start, layer.factors("default"), strict=True)
        )


@pytest.mark.parametrize("init", ["pissa", "olora"])
@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"use_rslora": True, "alpha": 3},
        {"rank_pattern": {"^proj_out": 2}, "alpha_pattern": {"to_q": 5.0, "^proj_out": 1}},
        {"use_rslora": True, "alpha_pattern": {"to_q": 5.0}},
    ],
)
def test_what_is_saved_is_a_plain_adapter_of_twice_the_rank_on_the_untouched_base(
    toy: nn.Module,
    make_toy: Make,
    toy_inputs: Inputs,
    train_a_little: Callable[[nn.Module], None],
    tmp_path: Path,
    init: str,
    changes: dict[str, Any],
) -> None:
    used = config(init, **changes)
    inject(toy, used, generator=seeded())
    train_a_little(toy)
    snapshot = adapter_snapshot(toy, used)
    assert snapshot.config.rank == 8
    for fqn in snapshot.targets:
        assert snapshot.config.rank_of(fqn) == 2 * used.rank_of(fqn)
        assert snapshot.config.scale_of(fqn) == pytest.approx(used.scale_of(fqn), rel=1e-12)
    write_peft(snapshot, tmp_path / "a", base_model="m")
    fields = json.loads((tmp_path / "a" / "adapter_config.json").read_text())
    assert (fields["r"], fields["init_lora_weights"]) == (8, True)
    plain = make_toy()
    load_peft(plain, tmp_path / "a")
    torch.testing.assert_close(plain(**toy_inputs), toy(**toy_inputs), rtol=1e-4, atol=1e-4)
    merged = dict(merged_state(toy))
    for name, tensor in merged_state(plain):
        torch.testing.assert_close(tensor, merged[name], rtol=1e-4, atol=1e-5)


def test_the_matrices_alone_are_never_written(toy: nn.Module, tmp_path: Path) -> None:
    from drl.lora import adapter_state

    inject(toy, config("pissa"), generator=seeded())
    with pytest.raises(LoraError, match="start values that they do not contain"):
        save_peft(adapter_state(toy), tmp_path / "a", config("pissa"), base_model=None)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("init", ["pissa", "olora"])
def test_a_directory_of_peft_needs_its_base_weights(
    make_toy: Make, toy_inputs: Inputs, tmp_path: Path, init: str
) -> None:
    peft = pytest.importorskip("peft")
    fields = {"r": 4, "lora_alpha": 6, "target_modules": list(TARGETS), "init_lora_weights": init}
    stock = peft.get_peft_model(make_toy(), peft.LoraConfig(**fields)).eval()
    with torch.no_grad():
        for name, parameter in stock.named_parameters():
            if ".lora_A." in name or ".lora_B." in name:
                noise = torch.randn(parameter.shape, generator=seeded(len(name)))
                parameter.add_(0.1 * noise)
    stock.save_pretrained(tmp_path / "a")
    with pytest.raises(LoraError, match="load_peft"):
        read_peft(tmp_path / "a")
    ours = make_toy()
    assert load_peft(ours, tmp_path / "a").init == init
    with torch.no_grad():
        expected = stock(**toy_inputs)
    torch.testing.assert_close(ours(**toy_inputs), expected, rtol=1e-4, atol=1e-4)


def test_resetting_starts_over_from_the_same_base(toy: nn.Module) -> None:
    inject(toy, config("pissa"), generator=seeded())
    first = {fqn: (a.A.clone(), a.B.clone()) for fqn, a in adapters(toy).items()}
    with torch.no_grad():
        for tensors in adapters(toy).values():
            tensors.A.add_(1)
    reset_adapters(toy, seeded())
    for fqn, tensors in adapters(toy).items():
        assert torch.equal(tensors.A, first[fqn][0])
        assert torch.equal(tensors.B, first[fqn][1])


def test_on_the_meta_device_the_start_waits_for_the_base(
    make_toy: Make, toy_inputs: Inputs
) -> None:
    direct, late = make_toy(), make_toy().to("meta")
    inject(direct, config("pissa"), generator=seeded())
    inject(late, config("pissa"), generator=seeded())
    late.to_empty(device="cpu")
    from drl.lora import base_names

    base, state = make_toy().state_dict(), late.state_dict()
    for live, plain in base_names(late).items():
        state[live].copy_(base[plain])
    reset_adapters(late, seeded())
    assert torch.equal(late(**toy_inputs), direct(**toy_inputs))


def test_start_values_are_no_state_and_no_parameters(toy: nn.Module) -> None:
    plain = {name for name, _ in toy.named_parameters()}
    inject(toy, config("pissa"), generator=seeded())
    assert not any("lora_start" in key for key in toy.state_dict())
    added = {name for name, p in toy.named_parameters() if p.requires_grad}
    assert len(added) == 2 * len(adapters(toy))
    assert len(list(toy.parameters())) == len(plain) + len(added)


@pytest.mark.parametrize(
    ("changes", "word"),
    [
        ({"init": "pissa", "target_modules": ("conv_in", "to_q")}, "of a Conv2d"),
        ({"init": "olora", "target_modules": ("label_emb",)}, "of a Embedding"),
        ({"init": "pissa", "rank": 9}, "has no 9 directions"),
        ({"init": "olora", "rank_pattern": {"to_q": 9}}, "blocks.0.attn.to_q"),
        ({"init": "pissa", "alpha_pattern": {"to_q": 0}}, "alpha is 0"),
        ({"init": "orthogonal", "rank": 3}, r"even ranks .*\[3\]"),
        ({"init": "orthogonal", "rank_pattern": {"to_q": 5}}, r"\[5\]"),
        ({"init": "pissa_niter_4"}, "random decomposition"),
        ({"init": "eva"}, "need data"),
    ],
)
def test_a_start_that_does_not_fit_is_refused_before_any_change(
    toy: nn.Module, changes: dict[str, Any], word: str
) -> None:
    before = str(toy)
    with pytest.raises(LoraError, match=word):
        inject(toy, config(**{"init": "gaussian", **changes}), generator=seeded())
    assert str(toy) == before

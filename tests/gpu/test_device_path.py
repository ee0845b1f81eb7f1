"""The forward's options on a GPU: frozen weights in bf16, recomputed and compiled blocks, attention kernels."""

from __future__ import annotations

import pytest
import torch
from tiny_transformer import WRAP, adapted, inputs, largest_difference, saved_bytes, transformer
from torch import Tensor, nn

from drl.errors import BadInput
from drl.model.attention import choose_attention
from drl.model.checkpointing import checkpoint_blocks
from drl.model.compiled import Compilations, compile_blocks
from drl.model.precision import compute_in, find_overrides, store_frozen

pytestmark = pytest.mark.gpu

BF16 = torch.bfloat16


def made(
    device: str, *, share: float = 0.0, kernel: str | None = None, compiled: bool = False
) -> nn.Module:
    """A trainer's model as it is built: kernel, recomputed blocks, adapters, frozen weights in bf16."""
    model = transformer().to(device)
    choose_attention("transformer", model, kernel, device=device, dtype=BF16)
    if share:
        checkpoint_blocks("transformer", model, WRAP, share, compiled=compiled)
    adapted(model)
    found = find_overrides("transformer", model, {"*.norm1.linear.*": "fp32"}, "bf16")
    store_frozen(model, "bf16", found)
    compute_in("transformer", model, found, "bf16")
    return model.train()


def backward(model: nn.Module, device: str) -> tuple[dict[str, Tensor], int]:
    """Return the adapters' gradients and the bytes kept for them."""
    model.zero_grad()
    moved = [value.to(device) for value in inputs()]
    with saved_bytes() as total, torch.autocast(device, dtype=BF16):
        prediction = model(*moved).sample
    prediction.float().square().sum().backward()
    grads = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    return grads, total[0]


def test_recomputed_blocks_give_the_same_bits_and_keep_less(device: str) -> None:
    (expected, all_bytes), (half, fewer), (whole, fewest) = (
        backward(made(device, share=share), device) for share in (0.0, 0.5, 1.0)
    )
    assert largest_difference(half, expected) == largest_difference(whole, expected) == 0.0
    assert fewest < fewer < all_bytes


def test_compiled_blocks_agree_and_recompile_nothing(device: str) -> None:
    expected, _ = backward(made(device), device)
    model = made(device, share=0.5, compiled=True)
    # on a CPU the compiler takes minutes and is tested elsewhere
    log = Compilations("trainer", "inductor" if device.startswith("cuda") else "eager")
    compile_blocks(model, WRAP, log)
    for _ in range(3):
        found, _ = backward(model, device)
    assert (log.graphs, log.unexpected) == (4, 0)
    model.eval()
    with torch.no_grad(), torch.autocast(device, dtype=BF16):
        model(*(value.to(device) for value in inputs()))
    assert log.unexpected == 0
    for name, gradient in found.items():
        scale = expected[name].norm().item() + 1e-3
        assert (gradient - expected[name]).norm().item() < 0.1 * scale, name


@pytest.mark.parametrize("kernel", ["_native_math", "_native_flash", "_native_efficient", "native"])
def test_torchs_kernels_agree(device: str, kernel: str) -> None:
    expected, _ = backward(made(device), device)
    if device == "cpu" and kernel == "_native_efficient":
        with pytest.raises(BadInput, match=f"'{kernel}' cannot be used here"):
            made(device, kernel=kernel)
        return
    model = made(device, kernel=kernel)
    found, _ = backward(model, device)
    for name, gradient in found.items():
        scale = expected[name].norm().item() + 1e-3
        assert (gradient - expected[name]).norm().item() < 0.1 * scale, name


def test_frozen_weights_take_half_the_memory(device: str) -> None:
    model = made(device)
    frozen = [p for p in model.parameters() if not p.requires_grad]
    single = sum(p.numel() for p in frozen) * 4
    kept = sum(p.numel() * p.element_size() for p in frozen)
    exact = [p for name, p in model.named_parameters() if ".norm1.linear." in name]
    assert kept == single / 2 + sum(p.numel() for p in exact if not p.requires_grad) * 2
    assert {p.dtype for p in exact} == {torch.float32}

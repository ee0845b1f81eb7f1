"""What the step does differently on a GPU: one fused kernel, float16 with its scaler, the average."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch import nn

from drl.config.sections import OptimizerSection
from drl.model.ema import Ema, EmaSettings
from drl.model.optimizers import build_optimizer
from drl.model.scaler import LossScaler

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="compares with a CUDA device"),
]


def optimizer_of(weights: dict[str, nn.Parameter], lr: float = 1e-2) -> torch.optim.Optimizer:
    options = OptimizerSection(lr=lr, weight_decay=0.1)
    return build_optimizer(SimpleNamespace(optimizer=options), weights)


def test_the_fused_kernel_steps_like_the_others() -> None:
    values = []
    for device in ("cpu", "cuda"):
        weight = nn.Parameter(torch.linspace(-1, 1, 7, device=device))
        optimizer = optimizer_of({"c.w": weight})
        assert optimizer.defaults["fused"] is (device == "cuda")
        for step in range(5):
            weight.grad = torch.linspace(1, -2, 7, device=device) * (step + 1)
            optimizer.step()
        values.append(weight.detach().cpu())
    torch.testing.assert_close(*values, rtol=1e-6, atol=1e-7)


def test_the_scaler_carries_small_gradients_through_float16() -> None:
    found = {}
    for enabled in (False, True):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 8)).cuda()
        scaler = LossScaler(enabled=enabled)
        x = torch.randn(16, 64, device="cuda")
        with torch.autocast("cuda", dtype=torch.float16):
            loss = model(x).float().square().mean() * 1e-7
        (loss * scaler.scale).backward()
        scaler.unscale(model.parameters())
        assert scaler.settle(None) is None
        found[enabled] = model[0].weight.grad.count_nonzero().item()
    assert found[False] < 0.5 * found[True]
    assert found[True] > 0.99 * 64 * 64


def test_the_average_is_the_same_on_both_devices_and_moves_with_the_model() -> None:
    states = []
    for device in ("cpu", "cuda"):
        torch.manual_seed(0)
        model = nn.Linear(33, 17)
        ema = Ema({f"c.{n}": p for n, p in model.named_parameters()}, EmaSettings())
        model.to(device)
        for step in range(4):
            with torch.no_grad():
                model.weight.mul_(1 + 0.1 * step)
            ema.update()
        with ema.swapped():
            assert model.weight.device.type == device
        model.to("cpu")
        ema.follow()
        states.append({name: tensor.clone() for name, tensor in ema.state().items()})
    for name, tensor in states[0].items():
        torch.testing.assert_close(states[1][name], tensor, rtol=1e-6, atol=1e-7)


def test_an_update_waits_for_nothing() -> None:
    """CUDA raises on a synchronisation in this mode."""
    weight = nn.Parameter(torch.ones(1024, device="cuda"))
    ema = Ema({"c.w": weight}, EmaSettings(decay_init=0.5, decay_flat_steps=9))
    torch.cuda.set_sync_debug_mode("error")
    try:
        ema.update()
        with ema.swapped():
            weight.sum()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert ema.distance().item() == 0.0

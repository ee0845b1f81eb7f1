"""FSDP2 on the device: one rank computes the unwrapped model's gradients, moves back and forth to shadows."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from gpu.facts import record
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from drl.interfaces.family import WeightSource
from drl.lora import LoraConfig, adapter_off, adapter_snapshot, inject, lora_layers
from drl.model.ema import Ema, EmaSettings
from drl.model.materialize import ShardSettings, spread
from drl.model.parallel import (
    Ranks,
    RankSettings,
    loopback_only,
    reshard,
    start_ranks,
    stop_ranks,
)
from drl_family_sd3.checkpoint import build_transformer
from drl_family_sd3.family import LORA_TARGETS

pytestmark = pytest.mark.gpu

WRAP = ("JointTransformerBlock",)
CONFIG = LoraConfig(rank=4, alpha=8, target_modules=LORA_TARGETS)
BOUNDS = {"fp32": 1e-5, "bf16": 2e-2}
"""Relative distance of all gradients; in bf16 the sharded base is stored in bf16, norms included."""


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory, device: str) -> Iterator[Ranks]:
    """The only rank of a process group: nccl on a GPU, gloo on a CPU."""
    rendezvous = tmp_path_factory.mktemp("ranks") / "rendezvous"
    with loopback_only():
        yield start_ranks(0, RankSettings(world=1, device=device), rendezvous)
        stop_ranks()


def model_of(checkpoint: Path, device: str, *, adapters: bool) -> nn.Module:
    """Return the tiny transformer; adapters that are far from zero, the same every time."""
    model = build_transformer(WeightSource(checkpoint=str(checkpoint), device=device))
    if adapters:
        inject(model, CONFIG, generator=torch.Generator().manual_seed(0))
        generator = torch.Generator().manual_seed(1)
        for layer in lora_layers(model).values():
            with torch.no_grad():
                layer.up.copy_(torch.randn(layer.up.shape, generator=generator) / 4)
    return model.train()


def sharded(model: nn.Module, ranks: Ranks, device: str, dtype: str) -> nn.Module:
    """Shard a model as a run does."""
    settings = ShardSettings(forward_dtype=dtype, reduce_dtype="fp32")
    spread("transformer", model, wrap=WRAP, ranks=ranks, settings=settings, device=device)
    return model


def predict(model: nn.Module, device: str, dtype: str) -> Tensor:
    """Return the prediction for fixed inputs, under the autocast that a run uses."""
    generator = torch.Generator().manual_seed(2)
    shapes = {
        "hidden_states": (4, 4, 16, 16),
        "encoder_hidden_states": (4, 32, 32),
        "pooled_projections": (4, 32),
    }
    given = {k: torch.randn(s, generator=generator).to(device) for k, s in shapes.items()}
    time = torch.tensor([900.0, 500.0, 250.0, 10.0], device=device)
    with torch.autocast(device, torch.bfloat16, enabled=dtype == "bf16"):
        output: Tensor = model(**given, timestep=time, return_dict=False)[0]
    return output


def gradients(model: nn.Module, device: str, dtype: str) -> dict[str, Tensor]:
    """Return the whole gradients of a squared prediction on the CPU."""
    predict(model, device, dtype).float().pow(2).mean().backward()
    return {name: whole(p.grad) for name, p in model.named_parameters() if p.grad is not None}


def whole(tensor: Tensor) -> Tensor:
    """Return a tensor, gathered if it is sharded, on the CPU."""
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach().cpu()


def distance(ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> float:
    """Return the norm of the difference of two gradients, relative to the second."""
    assert ours.keys() == theirs.keys()
    apart = torch.cat([(ours[name] - theirs[name]).flatten() for name in theirs]).norm()
    return (apart / torch.cat([tensor.flatten() for tensor in theirs.values()]).norm()).item()


@pytest.mark.parametrize("adapters", [True, False], ids=["adapters", "full weights"])
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_one_rank_has_the_gradients_of_the_unwrapped_model(
    checkpoint: Path, ranks: Ranks, device: str, dtype: str, adapters: bool
) -> None:
    plain = model_of(checkpoint, device, adapters=adapters)
    expected = gradients(plain, device, dtype)
    model = sharded(model_of(checkpoint, device, adapters=adapters), ranks, device, dtype)
    found = distance(gradients(model, device, dtype), expected)
    kind = "adapters" if adapters else "full weights"
    record("gradients, FSDP2 on one rank against unwrapped", **{f"{dtype}, {kind}": found})
    assert len(expected) == len([p for p in plain.parameters() if p.requires_grad])
    assert found <= BOUNDS[dtype]


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_adapters_switch_off_and_leave_whole_after_sharding(
    checkpoint: Path, ranks: Ranks, device: str, dtype: str
) -> None:
    bare = sharded(model_of(checkpoint, device, adapters=False), ranks, device, dtype)
    model = model_of(checkpoint, device, adapters=True)
    before = adapter_snapshot(model, CONFIG).tensors
    sharded(model, ranks, device, dtype)
    with torch.no_grad():
        base = predict(bare, device, dtype)
        on = predict(model, device, dtype)
        with adapter_off(model):
            off = predict(model, device, dtype)
    assert torch.equal(off, base)
    assert (on - base).abs().max() > 1e-3
    after = adapter_snapshot(model, CONFIG).tensors
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)


@pytest.mark.parametrize("wrapped", [False, True], ids=["unwrapped", "FSDP2"])
def test_a_shadow_changes_places_with_the_weights_and_back_to_the_bit(
    checkpoint: Path, ranks: Ranks, device: str, wrapped: bool
) -> None:
    model = model_of(checkpoint, device, adapters=False)
    if wrapped:
        sharded(model, ranks, device, "bf16")
    ema = Ema(dict(model.named_parameters()), EmaSettings(decay_init=0.5), models=[model])
    trained = {name: whole(p).clone() for name, p in model.named_parameters()}
    with torch.no_grad():
        first = predict(model, device, "bf16")
        reshard([model])  # without a backward pass some parameters are still gathered
        for parameter in model.parameters():
            parameter.mul_(1.5)
        moved = predict(model, device, "bf16")
        with ema.swapped():
            assert torch.equal(predict(model, device, "bf16"), first)
        assert torch.equal(predict(model, device, "bf16"), moved)
        reshard([model])
    assert not torch.equal(first, moved)
    for name, parameter in model.named_parameters():
        assert torch.equal(whole(parameter), 1.5 * trained[name]), name


def fail_while_swapped(ema: Ema) -> None:
    with ema.swapped():
        raise KeyError("inside")


def test_an_exception_while_swapped_brings_the_weights_back(checkpoint: Path, device: str) -> None:
    model = model_of(checkpoint, device, adapters=True)
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    ema = Ema(trained, EmaSettings(), models=[model])
    with torch.no_grad():
        for parameter in trained.values():
            parameter.add_(1.0)
    held = {name: p.detach().clone() for name, p in trained.items()}
    with pytest.raises(KeyError, match="inside"):
        fail_while_swapped(ema)
    assert all(torch.equal(p, held[name]) for name, p in trained.items())


def test_updates_of_a_shadow_are_those_of_the_cpu(checkpoint: Path, device: str) -> None:
    shadows = []
    for where in (device, "cpu"):
        model = model_of(checkpoint, where, adapters=True)
        trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
        ema = Ema(trained, EmaSettings(decay_init=0.25, decay_flat_steps=2), models=[model])
        for _ in range(2):
            with torch.no_grad():
                for parameter in trained.values():
                    parameter.mul_(1.25)
            ema.update()
        shadows.append({name: tensor.cpu() for name, tensor in ema.state().items()})
    there, here = shadows
    worst = max((there[name] - here[name]).abs().max().item() for name in here)
    record("EMA shadow against CPU", worst=worst)
    assert worst <= 1e-6

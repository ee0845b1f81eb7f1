"""Weights and shadow change places: exactly, whatever is raised, also between forward and backward."""

from __future__ import annotations

import itertools

import pytest
import torch
from small_net import FLAT, bits, ema_of, equal, move, net
from torch import nn
from torch.utils.checkpoint import checkpoint

from drl.errors import BadInput, ContractError
from drl.lora import LoraConfig, inject
from drl.model.ema import Ema, build_reference
from drl.model.optimizers import trainable_parameters


def test_swapping_puts_the_shadow_in_and_the_weights_back_to_the_bit() -> None:
    model = net()
    ema = ema_of(model)
    move(model)
    ema.update()
    before, objects = bits(model), {name: id(p) for name, p in model.named_parameters()}
    shadow = {name: tensor.clone() for name, tensor in ema.state().items()}
    with ema.swapped():
        inside = {f"net.{name}": p for name, p in model.named_parameters()}
        assert all(torch.equal(inside[name], tensor) for name, tensor in shadow.items())
        assert {name: id(p) for name, p in model.named_parameters()} == objects
        assert torch.equal(model.table, before["table"])
    assert equal(bits(model), before)
    assert equal(ema.state(), shadow)
    assert {name: id(p) for name, p in model.named_parameters()} == objects


def test_a_thousand_swaps_change_no_bit() -> None:
    model = net()
    ema = ema_of(model)
    move(model)
    ema.update()
    before, shadow = bits(model), {name: t.clone() for name, t in ema.state().items()}
    for _ in range(1000):
        with ema.swapped():
            pass
    assert equal(bits(model), before)
    assert equal(ema.state(), shadow)


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt, SystemExit])
def test_weights_come_back_whatever_is_raised(error: type[BaseException]) -> None:
    model = net()
    ema = ema_of(model)
    move(model)
    before = bits(model)
    with pytest.raises(error), ema.swapped():
        raise error
    assert equal(bits(model), before)
    ema.update()  # and the average goes on


def test_weights_come_back_when_the_shadow_goes_in_only_half_way(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = net()
    ema = ema_of(model)
    move(model)
    before = bits(model)
    calls = itertools.count()

    def full(parameter: nn.Parameter, shadow: torch.Tensor) -> None:
        if next(calls) == 2:
            raise MemoryError
        parameter.data = shadow

    monkeypatch.setattr("drl.model.ema.put_in", full)
    with pytest.raises(MemoryError), ema.swapped():
        pass
    assert equal(bits(model), before)


def test_swapping_twice_and_updating_while_swapped_are_refused() -> None:
    model = net()
    ema = ema_of(model)
    move(model)
    before = bits(model)
    with ema.swapped():
        with pytest.raises(ContractError, match="cannot be swapped twice"), ema.swapped():
            pass
        with pytest.raises(ContractError, match="cannot be updated while"):
            ema.update()
    assert ema.count == 0
    assert equal(bits(model), before)


def test_one_component_is_swapped_alone() -> None:
    models = {"transformer": net(1), "transformer_2": net(2)}
    ema = Ema(trainable_parameters(models), FLAT)
    for model in models.values():
        move(model)
    before = {name: bits(model) for name, model in models.items()}
    with ema.swapped("transformer"):
        assert not equal(bits(models["transformer"]), before["transformer"])
        assert equal(bits(models["transformer_2"]), before["transformer_2"])
    assert {name: equal(bits(m), before[name]) for name, m in models.items()} == {
        "transformer": True,
        "transformer_2": True,
    }
    with pytest.raises(ContractError, match="component 'vae'"), ema.swapped("vae"):
        pass


@pytest.mark.parametrize("checkpointed", [False, True])
def test_a_swap_between_forward_and_backward_leaves_the_gradient_alone(checkpointed: bool) -> None:
    """As a reference pass does; also when the backward pass computes the forward again."""
    x = torch.randn(5, 3)
    grads = []
    for swap in (False, True):
        model = net()
        ema = ema_of(model)
        move_generator = torch.Generator().manual_seed(7)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(torch.randn(parameter.shape, generator=move_generator))
        output = checkpoint(model, x, use_reentrant=False) if checkpointed else model(x)
        if swap:
            with ema.swapped(), torch.no_grad():
                assert not torch.equal(model(x), output)
        output.square().sum().backward()
        grads.append({name: p.grad for name, p in model.named_parameters() if p.grad is not None})
    assert equal(*grads)


def test_weights_that_autocast_has_cast_are_not_used_for_the_shadow() -> None:
    model = net()
    ema = ema_of(model)
    move(model)
    x = torch.randn(5, 3)
    with torch.autocast("cpu", dtype=torch.bfloat16), ema.swapped():
        alone = model(x)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        trained = model(x)  # caches the cast weights until the region ends
        with ema.swapped():
            assert torch.equal(model(x), alone)
        assert torch.equal(model(x), trained)


def test_the_optimizer_goes_on_as_if_nothing_had_been_swapped() -> None:
    x = torch.randn(5, 3)
    states = []
    for swap in (False, True):
        model = net()
        optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.1)
        ema = ema_of(model)
        for _ in range(4):
            optimizer.zero_grad()
            model(x).square().sum().backward()
            optimizer.step()
            ema.update()
            if swap:
                with ema.swapped():
                    model(x)
        states.append(bits(model) | {f"ema.{name}": t.clone() for name, t in ema.state().items()})
    assert equal(*states)


def test_the_shadow_follows_a_model_that_is_moved() -> None:
    parameter = nn.Parameter(torch.ones(2))
    ema = Ema({"c.w": parameter}, FLAT)
    torch.utils.swap_tensors(parameter, nn.Parameter(torch.ones(2, device="meta")))
    ema.follow()
    assert ema.state()["c.w"].device.type == "meta"


def test_the_reference_is_the_shadow_or_the_model_without_adapters() -> None:
    model = net()
    base = bits(model)
    config = LoraConfig(rank=2, alpha=4, target_modules=("first", "last"))
    inject(model, config, generator=torch.Generator().manual_seed(0))
    plain = net()
    plain.load_state_dict(base)
    ema = ema_of(model)
    x = torch.randn(5, 3)
    start = model(x).detach()
    move(model)
    models = {"net": model}
    with build_reference("lora_base", models, None)("net"):
        assert torch.equal(model(x), plain(x))
    with build_reference("ema", models, ema)("net"):
        assert torch.equal(model(x), start)
    assert not torch.equal(model(x), start)
    for mode, given in (("none", ema), ("ema", None)):
        with pytest.raises(BadInput, match=f"ref_mode = '{mode}'"):
            build_reference(mode, models, given)

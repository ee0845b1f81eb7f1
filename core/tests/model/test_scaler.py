"""Loss scaling: the rule of torch.amp.GradScaler, gradients that survive float16, overflows that skip."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from small_trainer import Scale, broken, parameters, shard, trainer
from torch import nn

from drl.errors import NonFiniteError
from drl.model.scaler import GROWTH_INTERVAL, INITIAL, OVERFLOW, LossScaler


def scaled(**options):
    """A trainer of a float16 forward pass."""
    made = trainer(**options)
    made.forward = replace(made.forward, dtype="fp16")
    made.scaler = LossScaler(enabled=True)
    return made


def test_disabled_it_changes_nothing():
    scaler = LossScaler(enabled=False)
    parameter = nn.Parameter(torch.ones(1))
    parameter.grad = torch.full((1,), 3.0)
    scaler.unscale([parameter])
    assert (scaler.scale, parameter.grad.item()) == (1.0, 3.0)
    assert scaler.settle(None) is None
    assert scaler.settle("non-finite gradient in w") == "non-finite gradient in w"
    assert scaler.metrics(overflow=False) == {}
    assert scaler.state() == {}


def test_the_scale_goes_where_torch_goes():
    """Good and bad steps in a random order, a growth among them, beside torch's own scaler."""
    generator = torch.Generator().manual_seed(0)
    parameter = nn.Parameter(torch.ones(2))
    optimizer = torch.optim.SGD([parameter], lr=0.0)
    theirs = torch.amp.GradScaler("cpu", init_scale=INITIAL, growth_interval=GROWTH_INTERVAL)
    ours = LossScaler(enabled=True)
    good = [True] * (GROWTH_INTERVAL - 1) + [False] + [True] * (GROWTH_INTERVAL + 5)
    good += (torch.rand(60, generator=generator) > 0.1).tolist()
    for step_is_good in good:
        theirs.scale(torch.zeros(()))
        parameter.grad = torch.full((2,), 1.0 if step_is_good else float("inf"))
        theirs.unscale_(optimizer)
        theirs.step(optimizer)
        theirs.update()
        ours.settle(None if step_is_good else "non-finite gradient in w")
        assert ours.scale == theirs.get_scale()
    state = theirs.state_dict()
    assert (ours.scale, ours.good_steps) == (state["scale"], state["_growth_tracker"])
    assert ours.overflow_steps == good.count(False)


def test_an_overflow_halves_the_scale_is_named_and_counted():
    scaler = LossScaler(enabled=True)
    reason = scaler.settle("non-finite gradient in transformer.weight")
    assert reason == (
        "overflow at loss scale 65536: non-finite gradient in transformer.weight; "
        "the next step runs at 32768"
    )
    assert scaler.metrics(overflow=True) == {
        "train/loss_scale": 32768.0,
        "train/overflow_steps": 1.0,
    }
    assert scaler.overflow_steps == 1


def test_at_scale_1_a_broken_gradient_is_a_bad_step():
    scaler = LossScaler(enabled=True)
    reasons = [scaler.settle("non-finite gradient in w") for _ in range(17)]
    assert all(reason.startswith(OVERFLOW) for reason in reasons[:16])
    assert reasons[16] == "non-finite gradient in w"
    assert (scaler.scale, scaler.overflow_steps) == (1.0, 16)


def test_the_state_goes_on_exactly():
    straight, first = LossScaler(enabled=True), LossScaler(enabled=True)
    verdicts = [None] * 5 + ["non-finite gradient in w"] + [None] * (GROWTH_INTERVAL + 3)
    for verdict in verdicts:
        straight.settle(verdict)
    for verdict in verdicts[:700]:
        first.settle(verdict)
    second = LossScaler(enabled=True)
    second.load(first.state())
    for verdict in verdicts[700:]:
        second.settle(verdict)
    assert second.state() == straight.state()
    assert second.state()["scale"] == INITIAL


def test_the_state_of_a_run_in_another_dtype_changes_nothing():
    scaler = LossScaler(enabled=True)
    scaler.load({})
    assert scaler.scale == INITIAL
    other = LossScaler(enabled=False)
    other.load({"scale": 4.0, "good_steps": 1, "overflow_steps": 2})
    assert other.scale == 1.0


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_gradients_are_unscaled_in_place_also_in_float16(dtype):
    scaler = LossScaler(enabled=True)
    held = [nn.Parameter(torch.zeros(3, dtype=dtype)), nn.Parameter(torch.zeros(2, dtype=dtype))]
    held[0].grad = torch.tensor([65536.0 / 4, 0.0, -1.0], dtype=dtype)
    scaler.unscale(held)  # the second never got a gradient
    assert held[0].grad.tolist() == [0.25, 0.0, -(2.0**-16)]
    assert held[1].grad is None


def tiny_gradient(x, scale):
    """Gradient 1e-9 through float16: below its smallest number, 6e-8."""
    weight = nn.Parameter(torch.zeros(1))
    loss = (weight.half() * x.half()).float().sum() * 1e-9
    (loss * scale).backward()
    return weight


def test_gradients_of_1e_9_in_float16_change_the_master_weights():
    x = torch.ones(1)
    assert tiny_gradient(x, 1.0).grad.item() == 0.0
    scaler = LossScaler(enabled=True)
    weight = tiny_gradient(x, scaler.scale)
    scaler.unscale([weight])
    assert weight.grad.item() == pytest.approx(1e-9, rel=1e-3)
    optimizer = torch.optim.AdamW([weight], lr=1e-3, weight_decay=0.0)
    optimizer.step()
    assert weight.item() == pytest.approx(-1e-3 * 1e-9 / (1e-9 + 1e-8), rel=1e-3)


def test_scaling_changes_no_bit_of_a_float32_step():
    plain, made = trainer(), trainer()
    made.scaler = LossScaler(enabled=True)
    for one in (plain, made):
        list(one.train(shard(7, steps=3)))
    left, right = parameters(plain), parameters(made)
    assert all(torch.equal(left[name], right[name]) for name in left)


def test_an_overflow_skips_the_step_but_not_the_schedule_and_is_no_bad_step():
    made = scaled(max_bad_steps=1)
    before = parameters(made)
    bias = dict(made.named_parameters())["transformer.bias"]
    handle = bias.register_hook(lambda grad: grad * float("inf"))
    reports = list(made.train(shard(steps=3)))
    handle.remove()
    assert all(report.skipped.startswith(OVERFLOW) for report in reports)
    assert all(torch.equal(before[name], value) for name, value in parameters(made).items())
    assert made.bad_steps == 0
    assert made.global_step == 3  # what the learning rate goes by
    assert [report.metrics["train/loss_scale"] for report in reports] == [32768, 16384, 8192]
    (report,) = made.train(shard())
    assert report.skipped is None
    assert report.metrics["train/overflow_steps"] == 0.0
    assert report.metrics["train/grad_norm"] < 10  # unscaled before it was clipped
    assert not torch.equal(before["transformer.bias"], parameters(made)["transformer.bias"])


def test_a_loss_that_is_not_finite_is_a_bad_step_and_leaves_the_scale_alone():
    made = scaled(max_bad_steps=1)
    (report,) = made.train(shard(change=broken))
    assert report.skipped.startswith("non-finite loss")
    assert (made.bad_steps, made.scaler.scale) == (1, INITIAL)
    with pytest.raises(NonFiniteError):
        list(made.train(shard(change=broken)))


def test_a_model_that_never_gives_a_finite_gradient_stops_the_run():
    made = scaled(max_bad_steps=2)
    bias = dict(made.named_parameters())["transformer.bias"]
    bias.register_hook(lambda grad: grad * float("nan"))
    for _ in range(16 + 2):  # from 65536 to 1, then as many bad steps as are allowed
        list(made.train(shard()))
    with pytest.raises(NonFiniteError, match=r"3 optimizer steps in a row were skipped"):
        list(made.train(shard()))


def test_an_overflow_between_bad_steps_does_not_forgive_them():
    made = scaled(max_bad_steps=5)
    list(made.train(shard(change=broken)))
    handle = dict(made.named_parameters())["transformer.bias"].register_hook(
        lambda grad: grad * float("inf")
    )
    list(made.train(shard()))
    handle.remove()
    assert made.bad_steps == 1
    list(made.train(shard(change=broken)))
    assert made.bad_steps == 2


def test_the_forward_dtype_decides_about_the_scaler():
    for dtype, enabled in (("fp32", False), ("bf16", False), ("fp16", True)):
        made = trainer(Scale())
        remade = type(made)(
            forward=replace(made.forward, dtype=dtype),
            optimizer=made.optimizer,
            settings=made.settings,
            context=made.context,
            updater=None,
        )
        assert remade.scaler.enabled is enabled

"""The moving average: decay tables, closed forms, what is averaged, and its state."""

from __future__ import annotations

import math

import pytest
import torch
from small_net import FLAT, ema_of, equal, move, net, one
from torch import nn

from drl.errors import BadInput, CheckpointError
from drl.lora import LoraConfig, inject
from drl.model.ema import Ema, EmaSettings, ema_decay
from drl.model.optimizers import trainable_parameters
from drl.testing.golden import load_golden


@pytest.mark.parametrize("kind", [0, 1, 2])
def test_golden_decay_of_the_original_code(kind: int) -> None:
    case = load_golden("nft_decay")["schedules"][kind]
    named = case["miles_settings"]
    settings = EmaSettings(
        decay_init=named["decay"],
        decay_ramp=named["uprate"],
        decay_max=named["uphold"],
        decay_flat_steps=named["flat_steps"],
    )
    assert [ema_decay(t, settings) for t in range(1, 101)] == case["nvlabs"][1:]
    assert [ema_decay(t, settings) for t in range(101)] == case["miles"]
    for step, value in case["nvlabs_more"].items():
        assert ema_decay(int(step), settings) == value


def test_golden_decay_and_shadow_of_the_flat_example() -> None:
    example = load_golden("nft_decay")["flat_example"]
    assert [ema_decay(t, FLAT) for t in range(1, 13)] == example["delta"]
    parameter, ema = one(example["shadow_start"])
    for update in example["updates"]:
        parameter.data.fill_(update["live"])
        ema.update()
        assert ema.state()["c.w"].item() == pytest.approx(update["shadow"], rel=1e-6)


def test_the_ramp_restarts_from_zero_and_the_first_value_needs_flat_updates() -> None:
    assert [ema_decay(t, FLAT) for t in (1, 2, 3)] == [0.5, 0.1, 0.2]
    unused = EmaSettings(decay_init=0.7, decay_ramp=0.25, decay_max=0.6, decay_flat_steps=0)
    assert [ema_decay(t, unused) for t in (1, 2, 3, 99)] == [0.25, 0.5, 0.6, 0.6]


def test_four_then_eight_gives_six_then_seven_point_eight() -> None:
    parameter, ema = one(4.0)
    parameter.data.fill_(8.0)
    ema.update()
    assert ema.state()["c.w"].item() == 6.0
    ema.update()
    assert ema.state()["c.w"].item() == pytest.approx(7.8, rel=1e-7)
    assert ema.count == 2


def test_a_constant_decay_sums_the_past_geometrically() -> None:
    settings = EmaSettings(decay_init=0.75, decay_flat_steps=1000)
    parameter = nn.Parameter(torch.zeros(1))
    ema = Ema({"c.w": parameter}, settings)
    values = [float(k * k % 7) for k in range(20)]
    for value in values:
        parameter.data.fill_(value)
        ema.update()
    closed = sum(0.25 * 0.75 ** (len(values) - 1 - k) * v for k, v in enumerate(values))
    assert ema.state()["c.w"].item() == pytest.approx(closed, rel=1e-6)


@pytest.mark.parametrize("decay", [0.0, 0.3, 0.999])
def test_a_weight_that_rests_keeps_a_shadow_equal_to_the_bit(decay: float) -> None:
    model = net()
    ema = ema_of(model, EmaSettings(decay_init=decay, decay_flat_steps=100))
    for _ in range(5):
        ema.update()
    assert ema.distance().item() == 0.0


def test_decay_0_is_a_copy_and_decay_1_never_moves() -> None:
    for decay, copies in ((0.0, True), (1.0, False)):
        model = net()
        start = {
            name: p.detach().clone() for name, p in trainable_parameters({"net": model}).items()
        }
        ema = ema_of(model, EmaSettings(decay_init=decay, decay_flat_steps=9))
        move(model)
        ema.update()
        expected = trainable_parameters({"net": model}) if copies else start
        assert all(torch.equal(tensor, expected[name]) for name, tensor in ema.state().items())


def test_the_distance_is_the_largest_difference() -> None:
    parameter, ema = one(4.0)
    assert ema.distance().item() == 0.0
    parameter.data.fill_(-1.5)
    assert ema.distance().item() == 5.5


def test_an_update_tells_its_decay_its_number_and_what_is_left_between_the_two() -> None:
    parameter, ema = one(4.0)
    parameter.data.fill_(8.0)
    assert ema.advance() == {
        "train/ema_decay": 0.5,
        "train/ema_updates": 1.0,
        "train/ema_distance": 2.0,
    }


def test_narrow_weights_keep_a_float32_shadow_that_takes_small_updates() -> None:
    parameter = nn.Parameter(torch.ones(1, dtype=torch.bfloat16))
    ema = Ema({"c.w": parameter}, EmaSettings(decay_init=0.999, decay_flat_steps=9999))
    parameter.data.fill_(2.0)
    for _ in range(10):
        ema.update()
    shadow = ema.state()["c.w"]
    assert shadow.dtype == torch.float32
    assert shadow.item() == pytest.approx(2 - 0.999**10, rel=1e-6)  # bfloat16 would stay at 1
    with ema.swapped():
        assert parameter.dtype == torch.bfloat16
    assert parameter.item() == 2.0


def test_frozen_parameters_and_buffers_are_not_averaged() -> None:
    ema = ema_of(net())
    names = ("first.weight", "first.bias", "last.weight", "last.bias")
    assert set(ema.state()) == {f"net.{name}" for name in names}


def test_of_adapters_only_the_adapters_are_averaged() -> None:
    model = net()
    config = LoraConfig(rank=2, alpha=4, target_modules=("first",))
    inject(model, config, generator=torch.Generator().manual_seed(0))
    ema = ema_of(model)
    assert len(ema.state()) == 2
    assert all("lora_" in name for name in ema.state())


def test_nothing_to_average_is_an_error() -> None:
    model = net().requires_grad_(False)
    with pytest.raises(BadInput, match="no trainable parameter"):
        Ema(dict(model.named_parameters()), FLAT)


def test_state_and_count_go_on_bit_for_bit() -> None:
    straight, first, second = net(), net(), net()
    whole, half = ema_of(straight), ema_of(first)
    for model, ema, count in ((straight, whole, 6), (first, half, 3)):
        torch.manual_seed(3)
        for _ in range(count):
            move(model)
            ema.update()
    rng = torch.get_rng_state()
    saved = {name: tensor.clone() for name, tensor in half.state().items()}
    second.load_state_dict(first.state_dict())
    resumed = ema_of(second)
    resumed.load(saved, 3)
    torch.set_rng_state(rng)
    for _ in range(3):
        move(second)
        resumed.update()
    assert resumed.count == whole.count == 6
    assert equal(whole.state(), resumed.state())


def test_a_forgotten_count_would_have_changed_the_decay() -> None:
    assert not math.isclose(ema_decay(4, FLAT), ema_decay(1, FLAT))


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda s: s.pop("net.first.bias"), r"1 missing \['net.first.bias'\], 0 unexpected"),
        (lambda s: s.update(extra=torch.zeros(1)), r"0 missing \[\], 1 unexpected \['extra'\]"),
        (
            lambda s: s.update({"net.last.bias": torch.zeros(3)}),
            r"1 of another shape \['net.last.bias: \(3,\), the model has \(2,\)'\]",
        ),
    ],
)
def test_a_shadow_of_another_model_is_refused_before_anything_changes(change, said: str) -> None:
    ema = ema_of(net(1))
    ema.count = 4
    before = {name: tensor.clone() for name, tensor in ema.state().items()}
    state = {name: tensor.clone() for name, tensor in ema_of(net(2)).state().items()}
    change(state)
    with pytest.raises(CheckpointError, match=said):
        ema.load(state, 9)
    assert ema.count == 4
    assert equal(ema.state(), before)


def test_weights_without_a_shadow_start_a_new_one() -> None:
    model = net()
    ema = ema_of(model)
    move(model)
    ema.update()
    move(model)
    ema.reset()
    assert ema.count == 0
    assert ema.distance().item() == 0.0
    move(model)
    assert ema.distance().item() > 0.0  # a copy, not the weights themselves


def test_the_decay_of_the_checkpoint_holds_and_a_difference_is_said() -> None:
    saved = ema_of(net(), FLAT)
    saved.count = 7
    other = ema_of(net(), EmaSettings(decay_init=0.5, decay_ramp=0.2, decay_max=0.9))
    facts = saved.facts()
    assert facts == {
        "count": 7,
        "decay_init": 0.5,
        "decay_ramp": 0.1,
        "decay_max": 0.9,
        "decay_flat_steps": 1,
    }
    assert other.take_settings(facts) == [
        "ema.decay_ramp: the recipe has 0.2, the checkpoint 0.1; the checkpoint's holds",
        "ema.decay_flat_steps: the recipe has 0, the checkpoint 1; the checkpoint's holds",
    ]
    assert other.settings == FLAT
    assert other.take_settings(facts) == []

"""Optimizers against hand-computed steps, by name, over what is trainable, resumed bit for bit."""

from __future__ import annotations

import io
import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from drl.config.sections import OptimizerSection
from drl.errors import BadInput
from drl.interfaces.family import TrainPipelineConfig
from drl.mathematics.schedule import learning_rate
from drl.model.describe import trainer_lines
from drl.model.optimizers import (
    OPTIMIZERS,
    build_optimizer,
    build_schedule,
    check_dtype,
    is_fused,
    trainable_parameters,
)


def recipe(**options: Any) -> SimpleNamespace:
    return SimpleNamespace(
        optimizer=OptimizerSection(**{"lr": 0.1, **options}),
        train=SimpleNamespace(
            num_rollout=4, master_dtype="fp32", forward_dtype="bf16", cpu_offload=False
        ),
        cluster=SimpleNamespace(device="cpu"),
        ema=SimpleNamespace(enabled=False),
    )


def stepped(gradients: list[float], start: float = 1.0, **options: Any) -> list[float]:
    """Values of one weight after each gradient."""
    weight = nn.Parameter(torch.tensor([start], dtype=torch.float64))
    optimizer = build_optimizer(recipe(**options), {"c.w": weight})
    values = []
    for gradient in gradients:
        weight.grad = torch.tensor([gradient], dtype=torch.float64)
        optimizer.step()
        values.append(weight.item())
    return values


def test_adam_by_hand() -> None:
    """Two steps of AdamW: decay first, then the ratio of the corrected moments."""
    options = {"beta1": 0.8, "beta2": 0.9, "eps": 1e-3, "weight_decay": 0.5}
    first, second = stepped([2.0, -1.0], **options)
    by_hand = 1.0 * (1 - 0.1 * 0.5) - 0.1 * 2.0 / (2.0 + 1e-3)
    assert first == pytest.approx(by_hand, rel=1e-12)
    mean = (0.8 * (0.2 * 2.0) + 0.2 * -1.0) / (1 - 0.8**2)
    square = (0.9 * (0.1 * 4.0) + 0.1 * 1.0) / (1 - 0.9**2)
    by_hand = by_hand * (1 - 0.1 * 0.5) - 0.1 * mean / (math.sqrt(square) + 1e-3)
    assert second == pytest.approx(by_hand, rel=1e-12)


def test_sgd_by_hand() -> None:
    """Momentum adds up the gradients; weight decay is a part of them."""
    first, second = stepped([2.0, -1.0], name="sgd", momentum=0.5, weight_decay=0.25)
    velocity = 2.0 + 0.25 * 1.0
    assert first == pytest.approx(1.0 - 0.1 * velocity, rel=1e-12)
    velocity = 0.5 * velocity + (-1.0 + 0.25 * first)
    assert second == pytest.approx(first - 0.1 * velocity, rel=1e-12)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_weight_decay_reaches_vectors_as_well_as_matrices(name: str) -> None:
    parameters = {"c.matrix": nn.Parameter(torch.ones(2, 2)), "c.bias": nn.Parameter(torch.ones(2))}
    optimizer = build_optimizer(recipe(name=name, weight_decay=0.5), parameters)
    for parameter in parameters.values():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    assert all((p == 1 - 0.1 * 0.5).all() for p in parameters.values())


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_only_what_is_trainable_is_stepped(name: str) -> None:
    frozen, trained = nn.Parameter(torch.ones(1), requires_grad=False), nn.Parameter(torch.ones(1))
    optimizer = build_optimizer(recipe(name=name), {"c.frozen": frozen, "c.trained": trained})
    held = [p for group in optimizer.param_groups for p in group["params"]]
    assert [id(p) for p in held] == [id(trained)]
    assert len(optimizer.param_groups) == 1


def test_nothing_trainable_is_an_error() -> None:
    frozen = nn.Parameter(torch.ones(1), requires_grad=False)
    for parameters in ({}, {"c.frozen": frozen}):
        with pytest.raises(BadInput, match="no parameter is trainable"):
            build_optimizer(recipe(), parameters)


def test_an_unknown_name_is_answered_with_the_nearest_and_all_others() -> None:
    made = recipe()
    made.optimizer = SimpleNamespace(name="adma")
    with pytest.raises(
        BadInput, match=r"no optimizer 'adma'; did you mean 'adam'\?; there are adam, sgd"
    ):
        build_optimizer(made, {"c.w": nn.Parameter(torch.ones(1))})


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_resumed_optimizer_goes_on_bit_for_bit(name: str, dtype: torch.dtype) -> None:
    def gradient(step: int) -> torch.Tensor:
        return torch.randn(4, 3, generator=torch.Generator().manual_seed(step)).to(dtype)

    def run(weight: nn.Parameter, optimizer: torch.optim.Optimizer, steps: range) -> None:
        for step in steps:
            weight.grad = gradient(step)
            optimizer.step()

    straight, first = (nn.Parameter(gradient(99)) for _ in range(2))
    whole = build_optimizer(recipe(name=name, lr=1e-2), {"c.w": straight})
    half = build_optimizer(recipe(name=name, lr=1e-2), {"c.w": first})
    run(straight, whole, range(6))
    run(first, half, range(3))
    file = io.BytesIO()
    torch.save({"weight": first.detach(), "optimizer": half.state_dict()}, file)
    saved = torch.load(io.BytesIO(file.getvalue()), weights_only=True)
    second = nn.Parameter(saved["weight"])
    resumed = build_optimizer(recipe(name=name, lr=1e-2), {"c.w": second})
    resumed.load_state_dict(saved["optimizer"])
    run(second, resumed, range(3, 6))
    assert torch.equal(straight, second)
    states = [next(iter(optimizer.state.values())) for optimizer in (whole, resumed)]
    assert all(isinstance(value, torch.Tensor) for value in states[0].values())  # what DCP stores
    assert all(torch.equal(states[0][key], states[1][key]) for key in states[0])


def test_the_state_of_narrow_weights_is_as_narrow() -> None:
    weight = nn.Parameter(torch.ones(2, dtype=torch.bfloat16))
    optimizer = build_optimizer(recipe(), {"c.w": weight})
    weight.grad = torch.ones_like(weight)
    optimizer.step()
    moments = [value for key, value in optimizer.state[weight].items() if key != "step"]
    assert {moment.dtype for moment in moments} == {torch.bfloat16}


@pytest.mark.parametrize(("lr", "moves"), [(1e-3, False), (1e-2, True)])
def test_bfloat16_weights_lose_updates_below_a_512th(lr: float, moves: bool) -> None:
    """The rule of thumb of the warning: AdamW moves a weight by about lr, and here it is 1."""
    weight = nn.Parameter(torch.ones(1, dtype=torch.bfloat16))
    optimizer = build_optimizer(recipe(lr=lr), {"c.w": weight})
    for _ in range(20):
        weight.grad = torch.ones_like(weight)
        optimizer.step()
    assert (weight.item() != 1.0) is moves
    assert moves is (lr > 1 / 512)


def test_float16_weights_need_a_large_eps() -> None:
    """The second moment of a gradient of 1e-3 is 0 there, and the default eps as well."""
    for eps, finite in ((1e-8, False), (1e-4, True)):
        weight = nn.Parameter(torch.ones(1, dtype=torch.float16))
        optimizer = build_optimizer(recipe(lr=1e-3, eps=eps), {"c.w": weight})
        weight.grad = torch.full_like(weight, 1e-3)
        optimizer.step()
        assert weight.isfinite().item() is finite


def test_one_kernel_steps_parameters_on_a_gpu_only() -> None:
    assert not is_fused([nn.Parameter(torch.ones(1))])
    optimizer = build_optimizer(recipe(), {"c.w": nn.Parameter(torch.ones(1))})
    assert (optimizer.defaults["fused"], optimizer.defaults["foreach"]) == (False, True)


def test_the_parameters_are_named_by_component_in_the_order_of_the_models() -> None:
    models = {"transformer": nn.Linear(2, 2), "transformer_2": nn.Linear(2, 2, bias=False)}
    models["transformer"].bias.requires_grad_(False)
    found = trainable_parameters(models)
    assert list(found) == ["transformer.weight", "transformer_2.weight"]
    assert found["transformer_2.weight"] is models["transformer_2"].weight


# what a person reads


@pytest.mark.parametrize(
    ("options", "device", "line"),
    [
        ({"lr": 3e-4}, "cpu", "AdamW (foreach), learning rate 0.0003, weights in fp32"),
        ({"lr": 1e-5}, "cuda:1", "AdamW (fused), learning rate 1e-05, weights in fp32"),
        (
            {"name": "sgd", "lr": 1.0, "lr_decay_style": "cosine"},
            "cuda",
            "SGD with momentum 0.9, learning rate 1, cosine, weights in fp32",
        ),
    ],
)
def test_the_header_says_which_optimizer_runs(
    options: dict[str, Any], device: str, line: str
) -> None:
    made = recipe(**options)
    made.cluster.device = device
    assert trainer_lines(made) == [line]


def test_weights_that_rest_on_the_cpu_are_not_stepped_by_the_gpus_kernel() -> None:
    made = recipe()
    made.cluster.device, made.train.cpu_offload = "cuda", True
    assert trainer_lines(made)[0].startswith("AdamW (foreach)")


def test_the_header_says_what_the_average_is_for_and_which_weights_make_the_pictures() -> None:
    made = recipe()
    made.ema = SimpleNamespace(enabled=True, rollout_policy="ema")
    made.algorithm = SimpleNamespace(ref_mode="ema")
    assert trainer_lines(made)[1] == (
        "moving average of the weights: rollouts and evaluations use it, adapter/ holds the trained "
        "weights; it is the reference"
    )
    made.train.forward_dtype = "fp16"
    assert trainer_lines(made)[0].endswith("weights in fp32, dynamic loss scale")


# schedule and dtypes


def test_the_schedule_is_as_long_as_the_run_unless_it_is_given() -> None:
    derived = build_schedule(recipe(lr_decay_style="linear"), 3)
    assert (derived.decay_iters, learning_rate(6, derived)) == (12, pytest.approx(0.05))
    assert build_schedule(recipe(lr_decay_iters=7), 3).decay_iters == 7


def test_a_warm_up_share_is_not_rounded_and_wins() -> None:
    made = build_schedule(recipe(lr_warmup_fraction=0.1, lr_warmup_iters=3, lr_decay_iters=25), 1)
    assert made.warmup == 2.5
    assert learning_rate(1, made) == pytest.approx(0.04)


def test_a_run_that_only_evaluates_has_a_schedule_too() -> None:
    made = recipe()
    made.train.num_rollout = 0
    assert build_schedule(made, 1).decay_iters == 1


def test_a_dtype_that_overflows_in_a_model_is_refused() -> None:
    config = TrainPipelineConfig(lora_targets=(), wrap=(), unsafe_dtypes=frozenset({"fp16"}))
    with pytest.raises(BadInput, match="'fp16' overflows in this model; use 'bf16' or 'fp32'"):
        check_dtype("fp16", config)
    check_dtype("bf16", config)
    check_dtype("fp16", TrainPipelineConfig(lora_targets=(), wrap=()))

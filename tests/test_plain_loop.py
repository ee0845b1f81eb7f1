"""The plain loop of benchmarks/ does the product's work: the same loss, gradients and step of the same pairs."""

from __future__ import annotations

import math
import sys
from argparse import Namespace
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "benchmarks"))

from common import transformer  # noqa: E402
from plain_loop import PlainLoop, log_prob, stacked  # noqa: E402
from training_loop import CASES, Case, Trial  # noqa: E402

PEFT = "base_model.model."


@pytest.fixture(scope="module", params=[False, True], ids=["", "checkpointing"])
def trial(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Trial:
    """The product's trainer on the small transformer, in float32 and eager mode."""
    options = Namespace(size="small", device="cpu", rows=2, eager=True)
    return Trial(options, tmp_path_factory.mktemp("trial"), checkpointing=request.param)


@pytest.fixture
def plain(trial: Trial) -> PlainLoop:
    return trial.plain_loop()


def fill(trial: Trial, *loops: PlainLoop, seed: int) -> None:
    """Give the adapters of all the same values, under which they change what the model predicts."""
    trial.trainer.optimizer.state.clear()
    generator = torch.Generator().manual_seed(seed)
    others = [trained(loop) for loop in loops]
    with torch.no_grad():
        for name, parameter in ours(trial).items():
            parameter.normal_(std=0.05, generator=generator)
            for other in others:
                other[name].copy_(parameter)


def ours(trial: Trial) -> dict[str, torch.nn.Parameter]:
    return {n: p for n, p in trial.model.named_parameters() if p.requires_grad}


def trained(loop: PlainLoop) -> dict[str, torch.nn.Parameter]:
    named = loop.model.named_parameters()
    return {name.removeprefix(PEFT): p for name, p in named if p.requires_grad}


def gradients(parameters: dict[str, torch.nn.Parameter]) -> Iterator[Tensor]:
    for name in sorted(parameters):
        grad = parameters[name].grad
        assert grad is not None, name
        yield grad.flatten()


@pytest.mark.parametrize("case", [CASES[0], CASES[2]], ids=lambda case: case.name)
def test_loss_metrics_and_gradients_are_those_of_the_product(
    trial: Trial, plain: PlainLoop, case: Case
) -> None:
    fill(trial, seed=1)
    shard = trial.shard(case, 3)
    fill(trial, plain, seed=2)  # other than those of the old log-probs: ratios are not 1
    with trial.case(case):
        product = trial.product(shard)
    batches = [stacked(pairs) for pairs in shard.windows[0]]
    assert [len(batch["latents"]) for batch in batches] == [2, 2, 2]
    script = plain.step(batches, trial.settings(case))
    assert script["ratio_abs_minus_1"] > 1e-3
    for name, value in script.items():
        assert value == pytest.approx(product[f"train/{name}"], rel=2e-4, abs=1e-7), name
    assert trained(plain).keys() == ours(trial).keys()
    mine, theirs = (torch.cat([*gradients(named)]) for named in (ours(trial), trained(plain)))
    assert mine.norm() > 1e-4
    torch.testing.assert_close(theirs, mine, rtol=1e-3, atol=1e-5 * mine.abs().max().item())


def test_the_step_is_clipped_and_taken_as_the_product_takes_it(
    trial: Trial, plain: PlainLoop
) -> None:
    case, settings = CASES[0], trial.trainer.settings
    shard = trial.shard(case, 1)
    fill(trial, plain, seed=3)
    before = {name: p.detach().clone() for name, p in ours(trial).items()}
    schedule = replace(settings.schedule, lr=1e-2)
    trial.trainer.settings = replace(settings, schedule=schedule, clip_grad=1e-3)
    try:
        with trial.case(case):
            norm = trial.product(shard)["train/grad_norm"]
    finally:
        trial.trainer.settings = settings
    assert norm > 1e-3
    chosen = replace(trial.settings(case), lr=1e-2, clip_grad=1e-3)
    plain.step([stacked(shard.windows[0][0])], chosen)
    clipped = torch.cat([*gradients(trained(plain))])
    assert clipped.norm().item() == pytest.approx(1e-3, rel=1e-3)
    moves = [
        torch.cat([(named[name] - before[name]).flatten() for name in before]).detach()
        for named in (ours(trial), trained(plain))
    ]
    # Adam's first step is the sign of a gradient; those that are nearly 0 may round to either
    assert ((moves[0] - moves[1]).abs() < 1e-4).float().mean() > 0.99
    assert moves[0].abs().max() == pytest.approx(1e-2, rel=1e-3)


def test_in_bfloat16_only_the_frozen_weights_and_the_forward_are(trial: Trial) -> None:
    case = CASES[0]
    shard = trial.shard(case, 1)
    model = transformer(trial.size, "cpu", torch.bfloat16)
    half = PlainLoop(
        model, rank=trial.size.rank, device="cpu", dtype=torch.bfloat16, checkpointing=False
    )
    full = trial.plain_loop()
    fill(trial, half, full, seed=3)
    frozen = {p.dtype for p in half.model.parameters() if not p.requires_grad}
    assert frozen == {torch.bfloat16}
    assert {p.dtype for p in half.trained} == {torch.float32}
    for loop in (half, full):
        loop.step([stacked(shard.windows[0][0])], trial.settings(case))
    near, exact = (torch.cat([*gradients(trained(loop))]) for loop in (half, full))
    assert near.dtype == torch.float32
    assert torch.nn.functional.cosine_similarity(near, exact, dim=0) > 0.99
    assert not torch.equal(near, exact)


def test_the_log_prob_of_a_step_by_hand() -> None:
    batch = {
        "latents": torch.full((2, 1, 2, 2), 1.0),
        "next_latents": torch.full((2, 1, 2, 2), 0.7),
        "sigma": torch.tensor([0.8, 1.0]),
        "sigma_next": torch.tensor([0.6, 0.9]),
        "sigma_max": torch.tensor([0.9, 0.9]),
    }
    found = log_prob(batch, torch.full((2, 1, 2, 2), 0.5), 0.7).tolist()
    # sigma 0.8: scale 0.7 sqrt(0.8 / 0.2) = 1.4, mean 1 - 0.245 - 0.1 - 0.0245, std 1.4 sqrt(0.2)
    first = -((0.7 - 0.6305) ** 2) / (2 * 1.96 * 0.2) - math.log(1.4 * math.sqrt(0.2))
    # sigma 1: the second sigma stands in, scale^2 = 0.49 / 0.1, mean 1 - 0.245 - 0.05
    second = -((0.7 - 0.705) ** 2) / (2 * 4.9 * 0.1) - math.log(math.sqrt(4.9 * 0.1))
    constant = 0.5 * math.log(2 * math.pi)
    assert found == pytest.approx([first - constant, second - constant], rel=1e-5)


@pytest.mark.parametrize(
    ("advantage", "shift", "factor"),
    [
        (1.0, 0.5, math.exp(0.5)),  # of a good row that became rarer nothing is clipped
        (1.0, -0.5, None),  # one that became likelier counts up to the range, and pushes no more
        (-1.0, 0.5, None),
        (-1.0, -0.5, math.exp(-0.5)),
        (9.0, -0.01, 5 * math.exp(0.01)),  # an advantage counts up to 5
    ],
)
def test_the_ratio_is_clipped_on_the_side_where_it_would_gain(
    trial: Trial, plain: PlainLoop, advantage: float, shift: float, factor: float | None
) -> None:
    case = CASES[0]
    given = stacked(trial.shard(case, 1).windows[0][0])
    settings = replace(trial.settings(case), clip_range=0.1, adv_clip_max=5.0)
    with torch.no_grad():
        new_B = log_prob(given, plain.velocity(given, 1.0).float(), settings.noise_level)
    batch = {**given, "log_prob_old": new_B + shift, "advantage": torch.full((2,), advantage)}
    loss, figures = plain.loss(batch, settings)
    loss.backward()
    pushed = any(bool(grad.any()) for grad in gradients(trained(plain)))
    ratio = math.exp(-shift)
    clipped = 1.1 if ratio > 1 else 0.9
    sign = min(advantage, 5.0)
    assert loss.item() == pytest.approx(max(-sign * ratio, -sign * clipped), rel=1e-4)
    assert figures["clipfrac"].item() == float(abs(ratio - 1) > 0.1)
    assert pushed == (factor is not None)

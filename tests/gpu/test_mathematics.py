"""Mathematics on the device: the same numbers as on the CPU."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from gpu.facts import record
from torch import Tensor

from drl.api import (
    VISUAL,
    Context,
    ForwardInputs,
    LossOutput,
    Pair,
    PairBatch,
    Predictions,
    ScoredTransition,
    Transition,
)
from drl.catalog import Catalog
from drl.lora import merge_delta
from drl.mathematics.checksum import tensors_digest
from drl.mathematics.gaussian import draw

pytestmark = pytest.mark.gpu

ROWS, LATENT = 6, (16, 16, 16)
SIGMAS = (1.0, 0.97, 0.9, 0.6, 0.3, 0.05)
SIGMAS_NEXT = (0.97, 0.9, 0.6, 0.3, 0.05, 0.0)


def backend(kind: str) -> Any:
    section = SimpleNamespace(type=kind, noise_level=0.7, log_prob_no_const=kind != "sde")
    return Catalog.load().create("sde_backend", kind, None, Context(section=section))


def normal(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def close(ours: Tensor, expected: Tensor) -> bool:
    return torch.allclose(ours.cpu(), expected, rtol=1e-6, atol=1e-6)


def step(kind: str, device: str) -> tuple[Transition, Tensor, Tensor]:
    """Return a transition, its next latents and their log-prob, computed on the device."""
    x, v, noise = (normal(ROWS, *LATENT, seed=seed).to(device) for seed in (0, 1, 2))
    sigma, after = (torch.tensor(values, device=device) for values in (SIGMAS, SIGMAS_NEXT))
    highest = torch.full_like(sigma, SIGMAS[1])
    made = backend(kind)
    transition = made.transition(x, v, sigma, after, sigma_max_B=highest)
    following = draw(transition.mean, transition.noise_std, noise)
    given = x + v * (after - sigma).reshape(-1, 1, 1, 1)
    rows = transition.noise_std > 0 if kind == "sde" else torch.ones_like(sigma, dtype=torch.bool)
    return transition, following, made.log_prob(given, transition)[rows]


@pytest.mark.parametrize("kind", ["sde", "cps", "ode"])
def test_a_step_is_that_of_the_cpu(kind: str, device: str) -> None:
    (expected, following, log_prob), (ours, drawn, scored) = step(kind, "cpu"), step(kind, device)
    pairs = {
        "mean": (ours.mean, expected.mean),
        "noise_std": (ours.noise_std, expected.noise_std),
        "std_dev_t": (ours.std_dev_t, expected.std_dev_t),
        "next": (drawn, following),
        "log_prob": (scored, log_prob),
    }
    worst = {name: (a.cpu() - b).abs().max().item() for name, (a, b) in pairs.items()}
    record("step against CPU", **{kind: max(worst.values())})
    assert all(close(a, b) for a, b in pairs.values()), worst


def policy_loss(device: str) -> tuple[LossOutput, Tensor]:
    """Return the loss of eight rows, two of them without weight, and its gradient."""
    catalog = Catalog.load()
    section = SimpleNamespace(kl_beta=0.1, adv_clip_max=5.0, ref_mode="lora_base")
    model = catalog.options_model("loss", "policy_loss")
    assert model is not None
    options = model.model_validate({"clip_range": 1e-2})
    loss = catalog.create("loss", "policy_loss", options, Context(section=section))
    old = -normal(8, seed=3).abs()
    log_prob = (old + 0.02 * normal(8, seed=4)).to(device).requires_grad_()
    batch = PairBatch(
        pairs=tuple(Pair(id=(n, 0), unit=n, sigma=0.5, tensors={}) for n in range(8)),
        tensors={},
        values={"advantage": normal(8, seed=5).to(device), "log_prob_old": old.to(device)},
        weight_B=torch.tensor([1.0] * 6 + [0.0] * 2, device=device),
        sigma_B=torch.full((8,), 0.5, device=device),
        timestep_B=None,
    )
    transition = ScoredTransition(
        mean={VISUAL: normal(8, *LATENT, seed=6).to(device)},
        std_dev_t_B={VISUAL: torch.linspace(0.5, 2.0, 8, device=device)},
        log_prob_B={VISUAL: log_prob},
        reference_mean={VISUAL: normal(8, *LATENT, seed=7).to(device)},
    )
    output = loss.compute(batch, ForwardInputs(streams={}), Predictions(trained={}), transition)
    (gradient,) = torch.autograd.grad(output.loss, log_prob)
    return output, gradient


def test_the_policy_loss_its_gradient_and_its_metrics_are_those_of_the_cpu(device: str) -> None:
    (expected, gradient), (ours, slope) = policy_loss("cpu"), policy_loss(device)
    record("policy_loss against CPU", loss=abs(ours.loss.item() - expected.loss.item()))
    assert close(ours.loss, expected.loss)
    assert close(slope, gradient)
    assert ours.metrics.keys() == expected.metrics.keys()
    for name, metric in ours.metrics.items():
        assert close(metric.total, expected.metrics[name].total), name
        assert close(metric.count, expected.metrics[name].count), name


def whole(*shape: int, seed: int, bits: int) -> Tensor:
    """Whole numbers of up to that many bits, as float32."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-(2**bits) + 1, 2**bits, shape, generator=generator).float()


@pytest.mark.parametrize("precision", ["highest", "high"])
def test_a_merge_that_float32_holds_exactly_is_exact(precision: str, device: str) -> None:
    # 12 bits times 8 bits, four of them: below 2^24, but more than TF32's 11 bits an operand
    base, down, up = (
        whole(48, 40, seed=0, bits=12),
        whole(4, 40, seed=1, bits=12),
        whole(48, 4, seed=2, bits=8),
    )
    expected = (base.double() + 0.5 * (up.double() @ down.double())).float()
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision(precision)
    try:
        with torch.autocast(torch.device(device).type, torch.bfloat16):
            merged = merge_delta(base.to(device), down.to(device), up.to(device), 0.5)
    finally:
        torch.set_float32_matmul_precision(before)
    assert torch.equal(merged.cpu(), expected)


def test_a_bf16_merge_is_that_of_the_cpu_up_to_one_rounding(device: str) -> None:
    base = normal(512, 512, seed=0).bfloat16()
    down, up = normal(32, 512, seed=1) / 32, normal(512, 32, seed=2) / 32
    expected = merge_delta(base, down, up, 2.0)
    merged = merge_delta(base.to(device), down.to(device), up.to(device), 2.0).cpu()
    unequal = merged != expected
    record("merge against CPU", different=int(unequal.sum()), of=unequal.numel())
    apart = merged[unequal].view(torch.int16).int() - expected[unequal].view(torch.int16).int()
    assert (apart.abs() <= 1).all(), "more than one bf16 rounding apart"
    assert unequal.float().mean() < 1e-3


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.int64])
def test_a_digest_does_not_depend_on_the_device(dtype: torch.dtype, device: str) -> None:
    tensor = (100 * normal(33, 7, seed=0)).to(dtype)
    there = tensor.to(device)
    assert tensors_digest(["a"], [there]) == tensors_digest(["a"], [tensor])
    assert tensors_digest(["a"], [there.t()]) == tensors_digest(["a"], [tensor.t().contiguous()])

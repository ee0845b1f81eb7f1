"""DiffusionNFT: golden numbers, the derivation on a Gaussian, noise levels, pairs, metrics, refusals."""

from __future__ import annotations

import math
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from drl.api import (
    VISUAL,
    BadInput,
    Context,
    ContractError,
    ForwardInputs,
    LossOutput,
    Need,
    Pair,
    PairBatch,
    Predictions,
    Sample,
    StepContext,
    Trajectory,
)
from drl.stages.pairs import build_shards
from drl.testing import make_sample
from drl.testing.golden import load_golden
from drl_loss_nft.config import NftConfig
from drl_loss_nft.levels import trained_levels
from drl_loss_nft.loss import Nft, error_of, implicit_policies, optimality


def nft(*, kl_beta: float = 0.0, clip: float = 5.0, **options: Any) -> Nft:
    section = SimpleNamespace(kl_beta=kl_beta, adv_clip_max=clip)
    return Nft(NftConfig(**options), Context(section=section))


def batch(
    clean: Tensor, t_B: Tensor, advantages: Tensor, weights: Tensor | None = None
) -> PairBatch:
    rows = clean.shape[0]
    return PairBatch(
        pairs=tuple(Pair(id=(i, 0), unit=i, sigma=float(t_B[i]), tensors={}) for i in range(rows)),
        tensors={VISUAL: clean},
        values={"advantage": advantages, "levels": torch.full((rows,), 4.0)},
        weight_B=torch.ones(rows) if weights is None else weights,
        sigma_B=t_B,
        timestep_B=None,
    )


def compute(
    loss: Nft,
    pairs: PairBatch,
    noised: Tensor,
    new: Tensor,
    old: Tensor,
    reference: Tensor | None = None,
) -> LossOutput:
    predictions = Predictions(
        trained={VISUAL: new},
        old={VISUAL: old},
        reference=None if reference is None else {VISUAL: reference},
    )
    return loss.compute(pairs, ForwardInputs(streams={VISUAL: noised}), predictions, None)


def figures(output: LossOutput) -> dict[str, float]:
    return {name: float(m.total / m.count) for name, m in output.metrics.items()}


@pytest.mark.parametrize("place", range(16))
def test_golden_formula_in_both_precisions(place: int) -> None:
    golden = load_golden("nft_loss")
    case, data = golden["cases"][place], golden["inputs"]
    double = case["dtype"] == "fp64"
    dtype, velocities = torch.float64 if double else torch.float32, golden["velocity_sets"]
    clean, noised, t_B, advantages = (
        torch.tensor(data[key]).to(dtype) for key in ("x0", "x_t", "t", "advantages")
    )
    new, old = (torch.tensor(velocities[case["set"]][key]).to(dtype) for key in ("v_new", "v_old"))
    new.requires_grad_()
    r_B = optimality(advantages, case["adv_clip_max"])
    assert r_B.tolist() == pytest.approx(case["r"], abs=1e-7)
    exact = case["set"] == "exact_prediction"
    for adaptive, theirs in (
        (True, case),
        (True, case["miles"]),
        (False, case["miles_no_adaptive_weight"]),
    ):
        positive_B, negative_B = (
            error_of(v, clean, noised, t_B, adaptive=adaptive)
            for v in implicit_policies(new, old, case["beta"])
        )
        loss_B = case["adv_clip_max"] * (r_B * positive_B + (1 - r_B) * negative_B) / case["beta"]
        tight = {"rel": 1e-6, "abs": 1e-7 if exact and not double else 1e-9}
        assert positive_B.tolist() == pytest.approx(theirs["pos_loss"], **tight)
        assert negative_B.tolist() == pytest.approx(theirs["neg_loss"], **tight)
        assert loss_B.tolist() == pytest.approx(
            theirs["per_sample"], rel=1e-6, abs=1e-6 if exact else 1e-9
        )
        if "grad_v_new" in theirs:
            (gradient,) = torch.autograd.grad(loss_B.mean(), new)
            far = (gradient - torch.tensor(theirs["grad_v_new"], dtype=dtype)).abs().max()
            assert float(far) < 1e-7


@pytest.mark.parametrize("place", range(0, 16, 2))
def test_golden_loss_through_compute(place: int) -> None:
    golden = load_golden("nft_loss")
    case, data = golden["cases"][place], golden["inputs"]
    clean, noised, t_B, advantages = (
        torch.tensor(data[key]) for key in ("x0", "x_t", "t", "advantages")
    )
    new, old = (
        torch.tensor(golden["velocity_sets"][case["set"]][key]) for key in ("v_new", "v_old")
    )
    new.requires_grad_()
    loss = nft(clip=case["adv_clip_max"], beta=case["beta"])
    output = compute(loss, batch(clean, t_B, advantages), noised, new, old)
    (gradient,) = torch.autograd.grad(output.loss / 5, new)
    got, exact = figures(output), case["set"] == "exact_prediction"
    # where the prediction is exact, both are rounding noise
    assert got["loss"] == pytest.approx(case["loss"], rel=1e-6, abs=1e-6 if exact else 0)
    assert got["nft_pos_loss"] == pytest.approx(sum(case["pos_loss"]) / 5, rel=1e-6, abs=1e-7)
    assert float((gradient - torch.tensor(case["grad_v_new"])).abs().max()) < 1e-7


@pytest.mark.parametrize(
    ("advantage", "limit", "r"),
    [(-5, 5, 0), (0, 5, 0.5), (5, 5, 1), (9, 5, 1), (-9, 5, 0), (2.5, 5, 0.75), (0.5, 1, 0.75)],
)
def test_r_maps_advantages_onto_zero_to_one(advantage: float, limit: float, r: float) -> None:
    assert float(optimality(torch.tensor([float(advantage)]), limit)) == r


def test_implicit_policies_by_hand() -> None:
    new, old = torch.tensor([3.0]), torch.tensor([1.0])
    assert [float(v) for v in implicit_policies(new, old, 1.0)] == [3.0, -1.0]
    assert [float(v) for v in implicit_policies(new, old, 0.25)] == [1.5, 0.5]


def test_the_adaptive_weight_is_a_float64_mean_without_gradient_and_has_a_floor() -> None:
    velocity = torch.tensor([[2.0, -4.0]], requires_grad=True)
    zero, t_B = torch.zeros(1, 2), torch.tensor([0.5])
    # x0' = -1, 2: mean square 2.5, mean absolute 1.5
    error_B = error_of(velocity, zero, zero, t_B, adaptive=True)
    assert float(error_B.detach()) == pytest.approx(2.5 / 1.5)
    (gradient,) = torch.autograd.grad(error_B.sum(), velocity)
    # of the square alone: 2 x0' (-t) / 2 elements / 1.5
    assert gradient.tolist() == [pytest.approx([0.5 / 1.5, -1.0 / 1.5])]
    tiny = error_of(torch.full((1, 2), 2e-6), zero, zero, t_B, adaptive=True)
    assert float(tiny) == pytest.approx(1e-12 / 1e-5)
    assert float(error_of(zero, zero, zero, t_B, adaptive=True)) == 0.0


MEAN, STD, SLOPE, LIMIT = 0.4, 0.7, 0.2, 5.0


def gaussian(t: float, nodes: int = 5) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Quadrature of x0 ~ N(MEAN, STD^2) and noise ~ N(0, 1): weights, x0, x_t, E[noise - x0 | x_t].

    r is linear in x0, so every integrand is a polynomial of degree 4: five nodes an axis are exact.
    """
    points, weights = np.polynomial.hermite_e.hermegauss(nodes)
    weights = weights / weights.sum()
    x0, noise = (torch.tensor(a).flatten() for a in np.meshgrid(MEAN + STD * points, points))
    share = torch.tensor(np.outer(weights, weights)).flatten()
    x_t = (1 - t) * x0 + t * noise
    variance = (1 - t) ** 2 * STD**2 + t**2
    slope = (t - (1 - t) * STD**2) / variance
    return share, x0, x_t, -MEAN + slope * (x_t - (1 - t) * MEAN)


def toy_gradient(t: float, beta: float, shift: float) -> float:
    """Gradient of the loss by a constant added to the exact velocity of the old policy."""
    share, x0, x_t, velocity = (value.float() for value in gaussian(t))
    # r = 0.5 + SLOPE (x0 - MEAN): within (0, 1) at every node
    advantages = 2 * LIMIT * SLOPE * (x0 - MEAN)
    assert float(advantages.abs().max()) < LIMIT
    theta = torch.tensor(shift, requires_grad=True)
    rows = torch.full_like(x0, t)
    pairs = batch(x0[:, None], rows, advantages, weights=share)
    loss = nft(clip=LIMIT, beta=beta, adaptive_weight=False)
    output = compute(loss, pairs, x_t[:, None], (velocity + theta)[:, None], velocity[:, None])
    (gradient,) = torch.autograd.grad(output.loss, theta)
    return float(gradient)


@pytest.mark.parametrize("t", [0.2, 0.5, 0.9, 1.0])
@pytest.mark.parametrize("beta", [1.0, 0.1])
def test_gradient_on_a_gaussian_is_that_of_the_derivation(t: float, beta: float) -> None:
    """At v = v_old: dL/dv = 2 m t^2 E[(2r - 1)(v_old - u)] = -4 m t^2 Cov(r, u), u = noise - x0.

    Given x_t, u = (x_t - x0) / t, so Cov(r, u | x_t) = -k Var(x0 | x_t) / t for r linear with slope k,
    and Var(x0 | x_t) = s^2 t^2 / ((1-t)^2 s^2 + t^2), whatever x_t is. beta does not enter.
    """
    posterior = STD**2 * t**2 / ((1 - t) ** 2 * STD**2 + t**2)
    expected = 4 * LIMIT * t * SLOPE * posterior
    assert toy_gradient(t, beta, 0.0) == pytest.approx(expected, rel=1e-4)


@pytest.mark.parametrize(("t", "beta"), [(0.5, 1.0), (0.9, 0.1), (0.3, 2.0)])
def test_the_optimum_on_a_gaussian_is_the_improved_policy(t: float, beta: float) -> None:
    """L is a parabola in v with its minimum at v_old + (2 / beta) Cov(r, u | x_t)."""
    posterior = STD**2 * t**2 / ((1 - t) ** 2 * STD**2 + t**2)
    best = -2 / beta * SLOPE * posterior / t
    assert toy_gradient(t, beta, best) == pytest.approx(0.0, abs=2e-5)
    assert toy_gradient(t, beta, best - 0.1) < 0 < toy_gradient(t, beta, best + 0.1)
    # curvature 2 m t^2 beta
    assert toy_gradient(t, beta, best + 0.1) == pytest.approx(0.2 * LIMIT * t**2 * beta, rel=1e-3)


def test_the_lowest_sigma_goes_with_the_default_fraction() -> None:
    table = torch.tensor([1, 0.8, 0.6, 0.4, 0.2, 0])
    assert trained_levels(table, 0.99) == pytest.approx([1, 0.8, 0.6, 0.4])
    assert trained_levels(table, 1.0) == pytest.approx([1, 0.8, 0.6, 0.4, 0.2])
    assert trained_levels(table, 0.1) == [1.0]
    assert trained_levels(torch.tensor([1.0, 0.5]), 1.0) == [1.0, 0.5]
    assert trained_levels(torch.tensor([1.0, 1e-9]), 0.99) == [1.0]
    assert trained_levels(torch.tensor([0.0]), 0.99) == [0.0]
    with pytest.raises(ContractError, match="sigma table is empty"):
        trained_levels(torch.tensor([]), 1.0)


def test_golden_number_of_levels() -> None:
    counts = load_golden("nft_decay")["timestep_count_at_fraction_0_99"]
    for steps, count in counts.items():
        table = torch.linspace(1, 0, int(steps) + 1)
        assert len(trained_levels(table, 0.99)) == count["miles_count"]


def scored(index: int, steps: int = 5) -> Sample:
    return make_sample(index=index, seed=index, steps=steps, reward=1.0)


def test_a_sample_becomes_one_pair_per_level_with_its_final_latents() -> None:
    sample = scored(3)
    assert sample.trajectory is not None
    pairs = nft(shuffle_timesteps=False).expand([sample], [0.7], StepContext())
    assert [pair.id for pair in pairs] == [(3, step) for step in range(4)]
    assert [pair.sigma for pair in pairs] == pytest.approx([1, 0.8, 0.6, 0.4])
    assert {pair.unit for pair in pairs} == {3}
    last = sample.trajectory.latents[VISUAL][-1]
    assert all(torch.equal(pair.tensors[VISUAL], last) for pair in pairs)
    assert all(pair.timestep is None and pair.negative is None for pair in pairs)
    assert pairs[0].values == {"advantage": pytest.approx(0.7), "levels": 4.0, "raw_reward": 1.0}


def test_the_order_of_levels_is_a_function_of_seed_rollout_and_sample() -> None:
    loss = nft(timestep_fraction=1.0)

    def order(index: int, **place: int) -> list[tuple[int, ...]]:
        context = StepContext(**place)  # type: ignore[arg-type]
        return [pair.id for pair in loss.expand([scored(index, 8)], [0.0], context)]

    torch.manual_seed(1)
    first = order(1)
    torch.manual_seed(2)
    assert order(1) == first == order(1, rank=3, window=2)
    assert sorted(first) == [(1, step) for step in range(8)]
    steps = [
        [step for _, step in o] for o in (first, order(2), order(1, rollout_id=1), order(1, seed=1))
    ]
    assert len({tuple(o) for o in steps}) == 4


def test_the_noise_of_a_level_does_not_depend_on_the_order() -> None:
    context = StepContext()
    noised = []
    for shuffled in (True, False):
        loss = nft(shuffle_timesteps=shuffled)
        pairs = {pair.id: pair for pair in loss.expand([scored(1)], [0.0], context)}
        rows = torch.stack([pairs[1, step].tensors[VISUAL] for step in range(4)])
        together = replace(
            batch(rows, torch.tensor([pairs[1, s].sigma for s in range(4)]), torch.zeros(4)),
            pairs=tuple(pairs[1, step] for step in range(4)),
        )
        noised.append(loss.prepare(together, context).streams[VISUAL])
    assert torch.equal(*noised)
    # at t = 1 nothing is left of the sample
    (first,) = torch.randn(1, *rows[0].shape, generator=context.generator("nft_noise", 1, 0))
    assert torch.equal(noised[0][0], first)


@pytest.mark.parametrize("samples", [2, 3, 5])
@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("rows", [1, 3])
def test_no_optimizer_window_parts_a_sample(samples: int, ranks: int, rows: int) -> None:
    units = [nft().expand([scored(n)], [0.1], StepContext()) for n in range(samples)]
    shards = build_shards(units, steps=2, micro_batch_size=rows, ranks=ranks, rollout_id=0)
    windows: dict[int, set[int]] = {}
    for shard in shards:
        for number, window in enumerate(shard.windows):
            for pair in (pair for pairs in window for pair in pairs if pair.weight):
                windows.setdefault(pair.unit, set()).add(number)
    assert [len(places) for _, places in sorted(windows.items())] == [1] * samples
    assert sum(w for w in shards[0].window_weights) == 4 * samples


def test_removed_and_unrewarded_samples_weigh_nothing() -> None:
    removed, failed = scored(0), scored(1)
    removed.removed, failed.reward = True, None
    pairs = nft().expand([removed, failed], [1.0, math.nan], StepContext())
    assert {(pair.weight, pair.values["advantage"]) for pair in pairs} == {(0.0, 0.0)}


def test_metrics_by_hand() -> None:
    clean, noised = torch.zeros(2, 1), torch.tensor([[1.0], [0.0]])
    pairs = batch(clean, torch.tensor([0.5, 1.0]), torch.tensor([10.0, -2.5]))
    new, old = torch.tensor([[1.0], [2.0]]), torch.tensor([[0.0], [1.0]])
    # x0+ = 0.5, -2; x0- = 1.5, 0; r = 1, 0.25
    got = figures(compute(nft(adaptive_weight=False), pairs, noised, new, old))
    losses = [5 * 0.25, 5 * (0.25 * 4 + 0.75 * 0)]
    assert got == pytest.approx(
        {
            "loss": sum(losses) / 2,
            "nft_loss": 4 * sum(losses) / 2,
            "nft_loss_per_pair": sum(losses) / 2,
            "nft_r_mean": 0.625,
            "nft_pos_loss": (0.25 + 4) / 2,
            "nft_neg_loss": 2.25 / 2,
            "nft_old_abs_diff": 1.0,
            "nft_adv_mean": 1.25,
            "nft_t_mean": 0.75,
            "nft_num_timesteps": 4.0,
            "adv_abs_mean": 3.75,
        }
    )


def test_kl_is_the_squared_distance_to_the_reference() -> None:
    clean = torch.zeros(1, 2)
    new = torch.tensor([[1.0, 3.0]], requires_grad=True)
    pairs = batch(clean, torch.tensor([0.5]), torch.tensor([0.0]))
    old, reference = torch.zeros(1, 2), torch.tensor([[0.0, 1.0]])
    plain = figures(compute(nft(), pairs, clean, new, old))
    got = figures(compute(nft(kl_beta=0.1), pairs, clean, new, old, reference))
    assert got["kl_loss"] == 2.5
    assert got["loss"] == pytest.approx(plain["loss"] + 0.25)
    assert got["nft_loss_per_pair"] == pytest.approx(plain["loss"])
    assert nft().needs == {Need.ROLLOUT, Need.OLD_PREDICTION}
    assert nft(kl_beta=0.1).needs == nft().needs | {Need.REFERENCE}
    with pytest.raises(BadInput, match=r"kl_beta is 0\.1.*ref_mode = \"lora_base\""):
        compute(nft(kl_beta=0.1), pairs, clean, new, old)


def test_the_old_policy_gets_no_gradient() -> None:
    clean, t_B = torch.zeros(1, 2), torch.tensor([0.5])
    new, old = (torch.ones(1, 2, requires_grad=True) for _ in range(2))
    output = compute(nft(), batch(clean, t_B, torch.tensor([1.0])), clean, new, old)
    of_new, of_old = torch.autograd.grad(output.loss, (new, old), allow_unused=True)
    assert of_old is None
    assert float(of_new.abs().min()) > 0


def test_what_is_missing_is_named() -> None:
    sample, loss = scored(7), nft()
    whole = sample.trajectory
    assert whole is not None
    with pytest.raises(ContractError, match="one advantage per sample"):
        loss.expand([sample], None, StepContext())
    windowed: Trajectory = replace(
        whole, latents={VISUAL: whole.latents[VISUAL][:3]}, latent_steps=(0, 1, 2)
    )
    sample.trajectory = windowed
    with pytest.raises(
        ContractError, match=r"sample 7 lacks its final latents, number 5; it has \(0, 1, 2\)"
    ):
        loss.expand([sample], [0.0], StepContext())
    sample.trajectory = None
    with pytest.raises(ContractError, match="sample 7 lacks its trajectory"):
        loss.expand([sample], [0.0], StepContext())
    sample.trajectory, sample.condition = whole, None
    with pytest.raises(ContractError, match="sample 7 lacks its condition"):
        loss.expand([sample], [0.0], StepContext())
    pairs = batch(torch.zeros(1, 2), torch.tensor([0.5]), torch.zeros(1))
    trained = Predictions(trained={VISUAL: torch.zeros(1, 2)})
    with pytest.raises(ContractError, match="needs the prediction of the old policy"):
        loss.compute(pairs, ForwardInputs(streams={VISUAL: torch.zeros(1, 2)}), trained, None)


@pytest.mark.parametrize(
    "wrong", [{"beta": 0}, {"beta": -1}, {"timestep_fraction": 0}, {"timestep_fraction": 1.01}]
)
def test_options_out_of_range_are_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(ValueError):
        NftConfig(**wrong)  # type: ignore[arg-type]

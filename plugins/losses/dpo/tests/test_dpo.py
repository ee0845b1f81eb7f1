"""Direct preference optimisation by hand: margins, gradients, draws, and the batch it lives in."""

from __future__ import annotations

import math
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from drl.api import (
    VISUAL,
    Context,
    ContractError,
    ForwardInputs,
    LossOutput,
    Need,
    PairBatch,
    Predictions,
    Sample,
    StepContext,
    rejected,
)
from drl.mathematics.noising import target_of
from drl.testing.builders import make_sample
from drl.testing.contracts.loss_driver import batch_of, run_window
from drl_loss_dpo.config import DpoConfig
from drl_loss_dpo.levels import draw_sigma
from drl_loss_dpo.loss import Dpo, accuracy_of, chosen_of

CONTEXT = StepContext(seed=5, section=SimpleNamespace(kl_beta=0.0, adv_clip_max=5.0))
LOG_2 = math.log(2.0)


def dpo(**options: Any) -> Dpo:
    return Dpo(DpoConfig(**options), Context(section=CONTEXT.section))


def preference(index: int = 3, *, removed: bool = False) -> Sample:
    sample = make_sample(index=index)
    sample.removed = removed
    generator = torch.Generator().manual_seed(index)
    sample.clean = {
        name: torch.randn(2, 1, 2, 2, generator=generator) for name in (VISUAL, rejected(VISUAL))
    }
    return sample


def rows_of(count: int) -> PairBatch:
    """A batch of which a loss reads the weights alone."""
    return PairBatch(
        pairs=(),
        tensors={},
        values={},
        weight_B=torch.ones(count),
        sigma_B=torch.full((count,), 0.5),
        timestep_B=None,
    )


def judged(
    loss: Dpo, trained: Tensor, reference: Tensor, *, pairs: PairBatch | None = None
) -> LossOutput:
    """Judge predictions ``(2B, 1)`` for targets of 0, chosen rows first."""
    inputs = ForwardInputs(streams={}, extras={target_of(VISUAL): torch.zeros_like(reference)})
    predictions = Predictions(trained={VISUAL: trained}, reference={VISUAL: reference})
    return loss.compute(pairs or rows_of(len(reference) // 2), inputs, predictions, None)


def figure(output: LossOutput, name: str) -> float:
    metric = output.metrics[name]
    return float(metric.total / metric.count)


def test_a_model_that_is_its_reference_loses_log_2_and_cannot_tell() -> None:
    same = torch.randn(6, 4)
    output = judged(dpo(), same, same)
    assert float(output.loss) == pytest.approx(3 * LOG_2)
    assert figure(output, "loss") == pytest.approx(LOG_2)
    assert figure(output, "dpo_margin") == 0.0
    assert figure(output, "dpo_accuracy") == 0.5


def test_equal_gains_on_both_pictures_leave_the_loss_at_log_2() -> None:
    reference = torch.tensor([[3.0], [5.0]])
    trained = torch.tensor([[2.0], [math.sqrt(20.0)]])  # errors 9 - 5 and 25 - 5
    output = judged(dpo(beta=10.0), trained, reference)
    assert float(output.loss) == pytest.approx(LOG_2, abs=1e-5)
    assert figure(output, "dpo_chosen_gain") == pytest.approx(5.0)
    assert figure(output, "dpo_rejected_gain") == pytest.approx(5.0)


def test_the_loss_by_hand() -> None:
    """Errors 1 and 9 under the model, 4 and 4 under the reference: gains 3 and -5, margin beta / 2 * 8."""
    trained, reference = torch.tensor([[1.0], [3.0]]), torch.tensor([[2.0], [2.0]])
    output = judged(dpo(beta=0.5), trained, reference)
    assert figure(output, "dpo_margin") == pytest.approx(2.0)
    assert float(output.loss) == pytest.approx(-math.log(1 / (1 + math.exp(-2.0))))
    swapped = judged(dpo(beta=0.5), trained.flip(0), reference)
    assert float(swapped.loss) == pytest.approx(-math.log(1 / (1 + math.exp(2.0))))
    assert (figure(output, "dpo_accuracy"), figure(swapped, "dpo_accuracy")) == (1.0, 0.0)


@pytest.mark.parametrize("beta", [0.1, 1.0, 40.0])
def test_beta_scales_the_margin(beta: float) -> None:
    trained, reference = torch.randn(2, 8), torch.randn(2, 8)
    one = figure(judged(dpo(beta=1.0), trained, reference), "dpo_margin")
    output = judged(dpo(beta=beta), trained, reference)
    assert figure(output, "dpo_margin") == pytest.approx(beta * one, rel=1e-5)
    assert float(output.loss) == pytest.approx(math.log1p(math.exp(-beta * one)), rel=1e-4)


def test_the_gradient_by_hand() -> None:
    """d loss / d v = sigmoid(-margin) beta / 2 * 2 (v - target) / n, turned round for what was rejected."""
    beta, reference = 0.7, torch.tensor([[1.0, 0.5], [0.3, -1.0]])
    trained = torch.tensor([[0.5, -0.25], [1.0, 2.0]], requires_grad=True)
    output = judged(dpo(beta=beta), trained, reference)
    (gradient,) = torch.autograd.grad(output.loss, trained)
    errors = (trained.detach() ** 2).mean(1), (reference**2).mean(1)
    gains = errors[1] - errors[0]
    slope = torch.sigmoid(-beta / 2 * (gains[0] - gains[1])) * beta / 2
    expected = slope * torch.tensor([[1.0], [-1.0]]) * trained.detach()
    assert torch.allclose(gradient, expected, rtol=1e-5)


def test_a_step_down_the_gradient_prefers_the_chosen_picture() -> None:
    reference = torch.randn(8, 5)
    trained = reference.clone().requires_grad_()
    (gradient,) = torch.autograd.grad(judged(dpo(beta=2.0), trained, reference).loss, trained)
    after = judged(dpo(beta=2.0), trained.detach() - 0.1 * gradient, reference)
    assert figure(after, "dpo_accuracy") == 1.0
    assert figure(after, "dpo_chosen_gain") > 0 > figure(after, "dpo_rejected_gain")
    assert figure(after, "loss") < LOG_2


@pytest.mark.parametrize("margin", [-1e4, 1e4])
def test_a_huge_margin_is_finite_and_has_a_finite_gradient(margin: float) -> None:
    trained = torch.tensor([[0.0], [math.sqrt(abs(margin))]])
    if margin < 0:
        trained = trained.flip(0)
    trained.requires_grad_()
    output = judged(dpo(beta=2.0), trained, torch.ones(2, 1))
    (gradient,) = torch.autograd.grad(output.loss, trained)
    assert output.loss.item() == pytest.approx(max(0.0, -margin))
    assert torch.isfinite(gradient).all()


def test_the_reference_gets_no_gradient_and_weights_count_preferences() -> None:
    trained, reference = (
        torch.randn(4, 3, requires_grad=True),
        torch.randn(4, 3, requires_grad=True),
    )
    pairs = replace(rows_of(2), weight_B=torch.tensor([1.0, 0.0]))
    output = judged(dpo(beta=0.1), trained, reference, pairs=pairs)
    output.loss.backward()
    assert reference.grad is None
    assert trained.grad is not None
    assert trained.grad[[1, 3]].abs().sum() == 0 < trained.grad[[0, 2]].abs().sum()
    assert output.metrics["dpo_margin"].count == 1.0


def test_half_precision_is_compared_in_float32() -> None:
    inputs = ForwardInputs(streams={}, extras={target_of(VISUAL): torch.full((2, 2), 1.001)})
    half = torch.ones(2, 2, dtype=torch.bfloat16)
    predictions = Predictions(trained={VISUAL: half}, reference={VISUAL: 2 * half})
    output = dpo().compute(rows_of(1), inputs, predictions, None)
    gain = 0.999**2 - 0.001**2
    assert figure(output, "dpo_chosen_gain") == pytest.approx(gain, rel=1e-5)


def test_accuracy_counts_a_tie_as_half() -> None:
    assert accuracy_of(torch.tensor([3.0, 0.0, -2.0])).tolist() == [1.0, 0.5, 0.0]


def test_both_pictures_have_one_level_and_one_noise() -> None:
    loss = dpo()
    pairs = batch_of(loss.expand([preference(n) for n in range(3)], None, CONTEXT))
    inputs = loss.prepare(pairs, CONTEXT)
    clean = torch.cat([pairs.tensors[VISUAL], pairs.tensors[rejected(VISUAL)]])
    target = inputs.extras[target_of(VISUAL)]
    assert inputs.rows_per_pair == 2
    assert list(inputs.streams) == [VISUAL]
    noise = target + clean
    assert torch.allclose(noise[:3], noise[3:], atol=1e-6)
    assert not torch.allclose(noise[0], noise[1])
    sigma = pairs.sigma_B.repeat(2).reshape(-1, 1, 1, 1, 1)
    assert torch.allclose(inputs.streams[VISUAL], clean + sigma * target, atol=1e-5)


def test_level_and_noise_belong_to_the_sample_not_to_rank_or_batch() -> None:
    loss, other = dpo(), replace(CONTEXT, rank=1, world=3, window=2)
    pairs = loss.expand([preference(n) for n in range(4)], None, CONTEXT)
    assert loss.expand([preference(2)], None, other)[0].sigma == pairs[2].sigma
    alone = loss.prepare(batch_of(pairs[2:3]), other).streams[VISUAL]
    together = loss.prepare(batch_of(pairs), CONTEXT).streams[VISUAL]
    assert torch.equal(alone, together[[2, 6]])
    reseeded = loss.expand([preference(2)], None, replace(CONTEXT, seed=6))[0]
    assert reseeded.sigma != pairs[2].sigma


def test_streams_are_noised_apart_and_their_errors_added() -> None:
    sample = preference()
    assert sample.clean is not None
    sample.clean = {**sample.clean, "sound": torch.ones(4), rejected("sound"): torch.zeros(4)}
    loss = dpo(beta=1.0)
    pairs = batch_of(loss.expand([sample], None, CONTEXT))
    inputs = loss.prepare(pairs, CONTEXT)
    assert set(inputs.streams) == set(chosen_of(sample.clean)) == {VISUAL, "sound"}
    exact = {name: inputs.extras[target_of(name)] for name in inputs.streams}
    away = {VISUAL: exact[VISUAL] + 1.0, "sound": exact["sound"] + 2.0}
    output = loss.compute(pairs, inputs, Predictions(trained=exact, reference=away), None)
    assert figure(output, "dpo_chosen_gain") == pytest.approx(5.0, rel=1e-5)
    assert figure(output, "dpo_rejected_gain") == pytest.approx(5.0, rel=1e-5)


def test_a_removed_preference_weighs_nothing() -> None:
    pairs = dpo().expand([preference(1), preference(2, removed=True)], None, CONTEXT)
    assert [pair.weight for pair in pairs] == [1.0, 0.0]
    assert [(pair.unit, pair.id) for pair in pairs] == [(1, (1,)), (2, (2,))]


@pytest.mark.parametrize("rows", [1, 2, 3, 5])
def test_a_window_has_the_gradient_of_one_batch_however_it_is_cut(rows: int) -> None:
    loss = dpo(beta=4.0)
    pairs = loss.expand([preference(n, removed=n == 3) for n in range(7)], None, CONTEXT)
    parameters = torch.tensor([0.3, -0.2])
    whole, cut = (run_window(loss, pairs, parameters, CONTEXT, size) for size in (7, rows))
    assert torch.allclose(cut.gradient, whole.gradient, rtol=1e-5)
    assert cut.weight == 6.0


@pytest.mark.parametrize(
    ("missing", "words"),
    [
        ("clean", "lacks clean latents"),
        ("condition", "lacks its condition"),
        ("rejected", r"rejected latents of 'visual' must have the shape .* got none"),
        ("shape", r"\(2, 1, 2, 2\), got \(2, 1, 4, 4\)"),
    ],
)
def test_a_record_that_is_no_preference_is_named(missing: str, words: str) -> None:
    sample = preference(9)
    assert sample.clean is not None
    if missing in {"clean", "condition"}:
        setattr(sample, missing, None)
    elif missing == "rejected":
        sample.clean = {VISUAL: sample.clean[VISUAL]}
    else:
        sample.clean = {**sample.clean, rejected(VISUAL): torch.zeros(2, 1, 4, 4)}
    with pytest.raises(ContractError, match=f"sample 9.*{words}"):
        dpo().expand([sample], None, CONTEXT)


def test_it_asks_for_a_reference_and_for_no_rollout() -> None:
    assert dpo().needs == {Need.REFERENCE}
    trained = {VISUAL: torch.zeros(2, 1)}
    inputs = ForwardInputs(streams={}, extras={target_of(VISUAL): torch.zeros(2, 1)})
    with pytest.raises(ContractError, match="needs the prediction of the reference"):
        dpo().compute(rows_of(1), inputs, Predictions(trained=trained), None)


@pytest.mark.parametrize("shift", [1.0, 3.0])
def test_uniform_levels_are_even_before_the_shift(shift: float) -> None:
    generator = torch.Generator().manual_seed(0)
    drawn = torch.tensor([draw_sigma("uniform", shift, generator) for _ in range(4000)])
    assert bool(((drawn > 0) & (drawn <= 1)).all())
    even = drawn / (shift - (shift - 1) * drawn)  # the shift undone
    assert float(even.mean()) == pytest.approx(0.5, abs=0.02)
    assert float(even.std()) == pytest.approx(math.sqrt(1 / 12), abs=0.01)


def test_logit_normal_levels_have_the_shifted_median() -> None:
    generator = torch.Generator().manual_seed(0)
    drawn = torch.tensor([draw_sigma("logit_normal", 3.0, generator) for _ in range(4000)])
    assert float(drawn.median()) == pytest.approx(0.75, abs=0.02)  # 3 / 2 over 1 + 2 / 2
    assert bool(((drawn > 0) & (drawn < 1)).all())


def test_the_options_decide_where_levels_lie() -> None:
    by_option = {
        (kind, shift): dpo(sigma=kind, flow_shift=shift)
        .expand([preference(4)], None, CONTEXT)[0]
        .sigma
        for kind in ("uniform", "logit_normal")
        for shift in (1.0, 3.0)
    }
    assert len(set(by_option.values())) == 4
    plain = by_option["uniform", 1.0]
    assert by_option["uniform", 3.0] == pytest.approx(3 * plain / (1 + 2 * plain))


@pytest.mark.parametrize(
    "bad", [{"beta": 0.0}, {"sigma": "grid"}, {"flow_shift": 0.0}, {"margin": 1.0}]
)
def test_unknown_and_impossible_options_are_refused(bad: dict[str, Any]) -> None:
    with pytest.raises(ValueError):
        DpoConfig(**bad)

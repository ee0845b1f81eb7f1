"""Latents through a step into the loss: golden numbers of flow_grpo, gradient at the velocity included."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
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
    SdeBackend,
)
from drl.catalog import Catalog
from drl.mathematics.gaussian import draw
from drl.testing.golden import load_golden
from drl_loss_flow_grpo.config import PolicyLossConfig
from drl_loss_flow_grpo.loss import PolicyLoss


class Chain:
    """One golden case: old, new and reference velocities through the SDE backend it names."""

    def __init__(self, golden: Any, case: Any, catalog: Catalog) -> None:
        data = golden["chain_inputs"]["image"]
        self.case = case
        self.x, self.noise = torch.tensor(data["x"]), torch.tensor(data["noise"])
        self.velocities = {key: torch.tensor(data[key]) for key in ("v_old", "v_new", "v_ref")}
        sigmas = torch.tensor(golden["tables"][case["table"]]["sigmas"])
        self.here_B, self.after_B, self.max_B = (
            sigmas[number].expand(2) for number in (case["step"], case["step"] + 1, 1)
        )
        section = SimpleNamespace(
            type=case["sde_type"],
            noise_level=case["noise_level"],
            log_prob_no_const=case["sde_type"] == "cps",
        )
        made = catalog.create("sde_backend", case["sde_type"], None, Context(section=section))
        self.backend: SdeBackend = made

    def step(self, velocity: Tensor):  # type: ignore[no-untyped-def]
        return self.backend.transition(
            self.x, velocity, self.here_B, self.after_B, sigma_max_B=self.max_B
        )

    def run(self) -> tuple[Tensor, Tensor, Tensor, LossOutput]:
        """Return next sample, old log-prob, new velocity (a leaf) and the loss."""
        old = self.step(self.velocities["v_old"])
        sample = draw(old.mean, old.noise_std, self.noise)
        old_B = self.backend.log_prob(sample, old)
        leaf = self.velocities["v_new"].clone().requires_grad_()
        new, reference = self.step(leaf), self.step(self.velocities["v_ref"])
        scored = ScoredTransition(
            mean={VISUAL: new.mean},
            std_dev_t_B={VISUAL: new.std_dev_t},
            log_prob_B={VISUAL: self.backend.log_prob(sample, new)},
            reference_mean={VISUAL: reference.mean},
        )
        pairs = PairBatch(
            pairs=tuple(Pair(id=(i, 0), unit=i, sigma=0.5, tensors={}) for i in range(2)),
            tensors={},
            values={"advantage": torch.tensor(self.case["advantages"]), "log_prob_old": old_B},
            weight_B=torch.ones(2),
            sigma_B=self.here_B,
            timestep_B=None,
        )
        section = SimpleNamespace(kl_beta=self.case["kl_beta"], adv_clip_max=5.0)
        loss = PolicyLoss(
            PolicyLossConfig(clip_range=self.case["clip_range"]), Context(section=section)
        )
        inputs, predictions = ForwardInputs(streams={}), Predictions(trained={})
        return sample, old_B, leaf, loss.compute(pairs, inputs, predictions, scored)


@pytest.mark.parametrize("place", range(8))
def test_golden_chain(place: int, catalog: Catalog) -> None:
    golden = load_golden("policy_loss")
    case = golden["chain"][place]
    sample, old_B, leaf, output = Chain(golden, case, catalog).run()
    (gradient,) = torch.autograd.grad(output.loss / 2, leaf)
    got = {name: float(m.total / m.count) for name, m in output.metrics.items()}
    last = case["step"] == 9
    assert torch.allclose(sample, torch.tensor(case["next_sample"]), rtol=2e-6, atol=2e-6)
    assert old_B.tolist() == pytest.approx(case["log_prob_old"], abs=5e-6 if last else 1e-6)
    assert got["policy_loss"] == pytest.approx(case["policy_loss"], abs=3e-6 if last else 1e-6)
    assert got["loss"] == pytest.approx(case["loss"], abs=3e-6 if last else 1e-6)
    assert got["kl_loss"] == pytest.approx(case["kl_loss"], rel=1e-3, abs=1e-9)
    assert got["clipfrac"] == case["clipfrac"]
    # differences of nearly equal log-probs: their rounding is what is left of approx_kl
    assert got["approx_kl"] == pytest.approx(case["approx_kl"], rel=0.02)
    theirs = torch.tensor(case["grad_v_new"])
    assert float((gradient - theirs).abs().max() / theirs.abs().max()) < 1e-5
    ratio = sum(case["ratio"]) / 2
    assert got["ratio_mean"] == pytest.approx(ratio, abs=3e-6 if last else 1e-6)


def test_before_the_first_step_the_ratio_is_exactly_one(catalog: Catalog) -> None:
    golden = load_golden("policy_loss")
    for case in golden["chain"]:
        chain = Chain(golden, case, catalog)
        chain.velocities["v_new"] = chain.velocities["v_old"]
        metrics = chain.run()[3].metrics
        assert float(metrics["ratio_abs_minus_1"].total) == 0.0
        assert float(metrics["log_prob_mean_abs_diff"].total) == 0.0

"""Recorded trajectories to pairs: by latent number, with clear refusals."""

from __future__ import annotations

import math
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from drl.api import VISUAL, Context, ContractError, Sample, StepContext, TrustError, successor
from drl.mathematics.recorded import encoded, recorded_pairs, weight_of
from drl.testing.builders import make_sample
from drl_loss_flow_grpo.config import PolicyLossConfig
from drl_loss_flow_grpo.loss import PolicyLoss


def recorded(**changes: Any) -> Sample:
    """A sample of four steps with reward 0.5; changes apply to its trajectory."""
    sample = make_sample(index=12, steps=4, reward=0.5)
    assert sample.trajectory is not None
    sample.trajectory = replace(sample.trajectory, **changes)
    return sample


def windowed() -> Sample:
    """Steps 1 and 2 are stochastic; latents 1 to 3 were returned, in this order, as 10, 20, 30."""
    latents = torch.tensor([10.0, 20.0, 30.0]).reshape(3, 1, 1, 1, 1)
    return recorded(latents={VISUAL: latents}, latent_steps=(1, 2, 3), sde_steps=(1, 2))


def test_latents_are_taken_by_number_not_by_place() -> None:
    first, second = recorded_pairs(windowed(), 1.0, None)
    assert (float(first.tensors[VISUAL]), float(first.tensors[successor(VISUAL)])) == (10.0, 20.0)
    assert (float(second.tensors[VISUAL]), float(second.tensors[successor(VISUAL)])) == (20.0, 30.0)


def test_a_pair_carries_what_its_step_had() -> None:
    sample = windowed()
    assert sample.trajectory is not None
    pair = recorded_pairs(sample, -0.75, None)[1]
    assert (pair.id, pair.unit, pair.weight) == ((12, 2), 12, 1.0)
    assert pair.sigma == 0.5
    assert pair.timestep == 500.0
    assert pair.condition is sample.condition
    assert pair.negative is sample.negative
    assert pair.values == {
        "advantage": -0.75,
        "log_prob_old": float(sample.trajectory.log_probs[2]),
        "sigma_next": 0.25,
        "sigma_max": 0.75,
        "step": 2.0,
        "raw_reward": 0.5,
    }


def test_removed_and_failed_samples_weigh_nothing() -> None:
    removed, failed = windowed(), windowed()
    removed.removed = True
    failed.reward = None
    assert weight_of(windowed()) == 1.0
    for sample in (removed, failed):
        assert weight_of(sample) == 0.0
        pairs = recorded_pairs(sample, math.nan, None)
        assert [pair.weight for pair in pairs] == [0.0, 0.0]
        assert all(math.isfinite(value) for pair in pairs for value in pair.values.values())


def test_streams_other_than_the_visual_one_come_along() -> None:
    latents = {"visual": torch.zeros(5, 4), "audio": torch.ones(5, 2)}
    (pair,) = recorded_pairs(recorded(latents=latents, sde_steps=(0,)), 1.0, None)
    assert sorted(pair.tensors) == ["audio", "audio.next", "visual", "visual.next"]


def test_a_shared_schedule_is_accepted_and_another_refused_with_both() -> None:
    sigmas = torch.linspace(1.0, 0.0, 5)
    assert len(recorded_pairs(recorded(), 1.0, sigmas)) == 4
    with pytest.raises(TrustError, match=r"sample 12 .*0\.75.*0\.8.*must share one schedule"):
        recorded_pairs(recorded(), 1.0, torch.tensor([1.0, 0.8, 0.5, 0.25, 0.0]))


def test_one_ulp_in_the_schedule_is_another_schedule() -> None:
    sigmas = torch.linspace(1.0, 0.0, 5)
    sigmas[2] = sigmas[2].nextafter(torch.tensor(1.0))
    with pytest.raises(TrustError):
        recorded_pairs(recorded(), 1.0, sigmas)


@pytest.mark.parametrize("record", ["trajectory", "condition"])
def test_a_missing_record_is_named(record: str) -> None:
    sample = recorded()
    setattr(sample, record, None)
    with pytest.raises(ContractError, match=f"sample 12 lacks its {record}"):
        recorded_pairs(sample, 1.0, None)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"sde_steps": ()}, "carries no trained-step list"),
        ({"sde_steps": (2, 4)}, r"names stochastic steps \[4\], but has steps 0 to 3"),
        ({"latent_steps": (0, 1, 2, 3, 9)}, r"lacks latents \[4\]"),
        ({"log_probs": torch.zeros(3)}, r"log-probs of shape \(3,\)"),
        ({"sigmas": torch.linspace(1, 0, 4)}, "5 sigmas"),
    ],
)
def test_records_that_do_not_fit_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ContractError, match=message):
        recorded_pairs(recorded(**changes), 1.0, None)


def test_a_log_prob_of_nan_is_refused_unless_the_sample_is_out() -> None:
    sample = recorded(log_probs=torch.tensor([0.0, 0.0, 0.0, math.nan]))
    with pytest.raises(TrustError, match="log-prob of step 3 is nan"):
        recorded_pairs(sample, 1.0, None)
    sample.removed = True
    assert len(recorded_pairs(sample, 1.0, None)) == 4


def test_the_loss_expands_its_unit_and_feeds_the_recorded_latents() -> None:
    section = SimpleNamespace(kl_beta=0.0, adv_clip_max=5.0)
    loss = PolicyLoss(PolicyLossConfig.model_validate({}), Context(section=section))
    assert loss.unit == "sample"
    pairs = loss.expand([windowed()], [1.0], StepContext(section=section))
    assert [pair.id for pair in pairs] == [(12, 1), (12, 2)]
    with pytest.raises(ContractError, match="one advantage per sample"):
        loss.expand([windowed()], None, StepContext(section=section))


def test_a_record_without_latents_or_condition_is_named_with_what_is_trained_on() -> None:
    sample = make_sample(index=7, steps=2, reward=None)
    assert sample.condition is not None
    sample.clean = None
    with pytest.raises(ContractError) as refusal:
        encoded(sample, "this loss trains on records")
    assert str(refusal.value) == "sample 7 lacks clean latents; this loss trains on records"
    sample.clean = {VISUAL: torch.zeros(2)}
    assert encoded(sample, "") == (sample.clean, sample.condition)
    sample.condition = None
    with pytest.raises(ContractError, match="sample 7 lacks its condition; records"):
        encoded(sample, "records")

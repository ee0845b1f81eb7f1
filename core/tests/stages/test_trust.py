"""Samples that are not what was asked for stop the run at once."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from drl.errors import TrustError
from drl.stages.trust import check_samples, prove_parity_once, unproven_settings
from drl.testing import make_prompt, make_sample
from drl.types import Media, ParityReport, RolloutRequest, Sampling

SAMPLING = Sampling(
    num_steps=4, height=16, width=16, guidance_scale=4.5, flow_shift=3.0, sde_type="sde"
)
REQUEST = RolloutRequest(
    prompt=make_prompt(), group_index=0, members=(0,), seeds=(7,), sampling=SAMPLING
)


def run(*, version=2, schedule=None):
    return SimpleNamespace(
        version=version,
        recipe=SimpleNamespace(
            trust=SimpleNamespace(settings=True, parity=True, max_log_prob_diff=1e-5)
        ),
        schedule=lambda sampling: schedule,
    )


def sample(**changes):
    made = make_sample(seed=7, steps=4)
    made.version = 2
    made.echo = {"guidance_scale": 4.5, "flow_shift": 3.0}
    for name, value in changes.items():
        setattr(made, name, value)
    return made


def test_a_sample_as_asked_passes():
    check_samples(run(), REQUEST, [sample()])


def test_a_missing_sample_is_named():
    with pytest.raises(TrustError, match="asked for 1 samples, got 0"):
        check_samples(run(), REQUEST, [])


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"seed": 8}, "seed 7, got 8"),
        ({"version": 1}, "version 1"),
        ({"echo": {"flow_shift": 1.0}}, "flow_shift: asked for 3.0, used 1.0"),
        ({"echo": {"guidance_scale": 1.0}}, "guidance_scale: asked for 4.5, used 1.0"),
        ({"media": Media(pixels=torch.zeros(3, 1, 16, 32))}, "32x16"),
    ],
)
def test_other_settings_than_asked_stop_the_run(changes, message):
    with pytest.raises(TrustError, match=message):
        check_samples(run(), REQUEST, [sample(**changes)])


def test_a_shift_on_the_rollout_side_only_names_both_schedules():
    own = torch.tensor([1.0, 0.9, 0.75, 0.5, 0.0])
    with pytest.raises(
        TrustError, match=r"(?s)rollout: \[1\.0000, 0\.7500.*training: \[1\.0000, 0\.9"
    ):
        check_samples(run(schedule=own), REQUEST, [sample()])


def test_fewer_steps_than_asked_are_seen():
    short = make_sample(seed=7, steps=3)
    short.version = 2
    with pytest.raises(TrustError, match="used 3 steps"):
        check_samples(run(), REQUEST, [short])


def test_other_stochastic_steps_than_asked_are_seen():
    request = replace(REQUEST, sde_steps=(1, 2))
    with pytest.raises(TrustError, match=r"steps \(1, 2\)"):
        check_samples(run(), request, [sample()])


def test_what_cannot_be_proven_is_listed():
    unproven = unproven_settings(frozenset({"guidance_scale"}))
    assert "negative_prompt" in unproven
    assert "guidance_scale" not in unproven
    assert "num_steps" not in unproven


def parity_run(by_step):
    said: list[str] = []
    made = run()
    made.parity = None
    made.needs_rollout = True
    made.event = said.append
    made.trainer = SimpleNamespace(replay=lambda shards: ParityReport(by_step=by_step, rows=4))
    return made, said


def test_parity_within_the_limit_is_reported_once():
    made, said = parity_run({0: 0.0, 1: 1e-6})
    prove_parity_once(made, [])
    prove_parity_once(made, [])
    assert len(said) == 1
    assert "1.00e-06" in said[0]


@pytest.mark.parametrize("worst", [1e-3, float("nan")])
def test_parity_above_the_limit_or_nan_stops_before_the_first_step(worst):
    made, _ = parity_run({0: 0.0, 3: worst})
    with pytest.raises(TrustError, match="step 3"):
        prove_parity_once(made, [])

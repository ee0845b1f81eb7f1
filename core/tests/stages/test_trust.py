"""Samples that are not what was asked for stop the run at once."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from drl.errors import TrustError
from drl.stages.trust import (
    check_echoes,
    check_samples,
    clipped_by_rounding,
    prove_parity_once,
    unproven_settings,
)
from drl.testing import make_prompt, make_sample
from drl.types import Media, Need, ParityReport, RolloutRequest, Sampling

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
    made.loss = SimpleNamespace(
        needs={Need.ROLLOUT, Need.TRANSITION, Need.OLD_LOG_PROB},
        ratio_width=None,
        recomputes_old_log_prob=False,
    )
    made.event = said.append
    made.trainer = SimpleNamespace(replay=lambda shards: ParityReport(by_step=by_step, rows=4))
    return made, said


def test_parity_within_the_limit_is_reported_once():
    made, said = parity_run({0: 0.0, 1: 1e-6})
    prove_parity_once(made, [])
    prove_parity_once(made, [])
    assert len(said) == 1
    assert "1.00e-06" in said[0]


def test_ratios_that_rounding_alone_clips_are_told():
    report = ParityReport(
        by_step={0: 9e-4, 8: 3e-4, 9: 8e-4},
        rows=6,
        mean_by_step={0: 9e-5, 8: 1.2e-4, 9: 3.94e-4},
        rows_by_step={0: 2, 8: 2, 9: 2},
    )
    made, said = parity_run({})
    made.trainer.replay = lambda shards: report
    made.recipe.trust.max_log_prob_diff = 2e-3
    made.loss.ratio_width = 1e-4
    prove_parity_once(made, [])
    assert len(said) == 2
    assert said[1].startswith("warning: rounding alone moves ratios further from 1 than the loss")
    assert "(1e-04); mean by step: 8: 1.2e-04, 9: 3.9e-04. " in said[1]


@pytest.mark.parametrize(
    ("width", "recomputes"), [(None, False), (1e-4, True), (1e-3, False), (2e-4, False)]
)
def test_ratios_that_are_not_clipped_are_no_matter(width, recomputes):
    report = ParityReport(by_step={0: 9e-4}, rows=2, mean_by_step={0: 2e-4}, rows_by_step={0: 2})
    loss = SimpleNamespace(ratio_width=width, recomputes_old_log_prob=recomputes)
    assert clipped_by_rounding(report, loss) is None


@pytest.mark.parametrize("worst", [1e-3, float("nan")])
def test_parity_above_the_limit_or_nan_stops_before_the_first_step(worst):
    made, _ = parity_run({0: 0.0, 3: worst})
    with pytest.raises(TrustError, match="step 3"):
        prove_parity_once(made, [])


@pytest.mark.parametrize(
    ("changes", "got"),
    [
        ({"group_index": 1}, r"\(1, 0, 0\)"),
        ({"member": 2}, r"\(0, 2, 0\)"),
        ({"prompt": make_prompt(row=9)}, r"\(0, 0, 9\)"),
    ],
)
def test_a_sample_of_another_place_is_refused_with_both_places(changes, got):
    with pytest.raises(TrustError, match=rf"asked for .* \(0, 0, 0\), .* a sample of {got}"):
        check_samples(run(), REQUEST, [sample(**changes)])


@pytest.mark.parametrize(
    ("used", "fine"),
    [
        (4.5, True),
        (4.5 * (1 + 0.9e-6), True),
        (4.5 * (1 + 1.2e-6), False),
        ("4.5", False),
        (None, False),
    ],
)
def test_echoed_numbers_may_have_gone_through_single_precision(used, fine):
    echo = {"guidance_scale": used}
    if fine:
        check_samples(run(), REQUEST, [sample(echo=echo)])
    else:
        with pytest.raises(TrustError, match=r"guidance_scale: asked for 4\.5"):
            check_samples(run(), REQUEST, [sample(echo=echo)])


@pytest.mark.parametrize(
    ("used", "fine"), [(0.0, True), (9e-7, True), (2e-6, False), (-2e-6, False)]
)
def test_small_numbers_are_compared_absolutely(used, fine):
    request = replace(REQUEST, sampling=replace(SAMPLING, noise_level=0.0))
    given = sample(echo={"noise_level": used})
    if fine:
        check_samples(run(), request, [given])
    else:
        with pytest.raises(TrustError, match=r"noise_level: asked for 0\.0"):
            check_samples(run(), request, [given])


def test_a_setting_that_nobody_asked_for_is_another_setting():
    with pytest.raises(TrustError, match="sparkle: asked for None, used 3"):
        check_samples(run(), REQUEST, [sample(echo={"sparkle": 3})])


def test_all_settings_that_differ_are_told_at_once():
    echo = {"guidance_scale": 1.0, "flow_shift": 1.0, "sde_type": "sde"}
    with pytest.raises(TrustError) as refusal:
        check_samples(run(), REQUEST, [sample(echo=echo)])
    assert str(refusal.value).splitlines()[1:] == [
        "  guidance_scale: asked for 4.5, used 1.0",
        "  flow_shift: asked for 3.0, used 1.0",
    ]


def test_an_echo_that_was_promised_and_kept_back_is_named():
    check_echoes(frozenset({"flow_shift"}), [sample()])
    check_echoes(frozenset(), [sample(echo={})])
    with pytest.raises(
        TrustError, match=r"echoes height, width, but a sample of group 0 came with"
    ):
        check_echoes(frozenset({"width", "flow_shift", "height"}), [sample()])


def test_without_the_checks_of_settings_only_identity_counts():
    lenient = run()
    lenient.recipe.trust.settings = False
    odd = sample(echo={"flow_shift": 1.0}, media=Media(pixels=torch.zeros(3, 1, 8, 8)))
    check_samples(lenient, REQUEST, [odd])
    with pytest.raises(TrustError, match="version 1"):
        check_samples(lenient, REQUEST, [sample(version=1)])


@pytest.mark.parametrize(
    ("shape", "said"),
    [((3, 1, 16, 16), None), ((3, 2, 16, 16), "2 frames of 16x16"), ((3, 1, 8, 16), "16x8")],
)
def test_frames_height_and_width_are_those_of_the_request(shape, said):
    given = sample(media=Media(pixels=torch.zeros(shape)))
    if said is None:
        check_samples(run(), REQUEST, [given])
    else:
        with pytest.raises(TrustError, match=f"{said}; the recipe asks for 1 of 16x16"):
            check_samples(run(), REQUEST, [given])


@pytest.mark.parametrize(("off", "fine"), [(1e-7, True), (4e-7, False), (-4e-7, False)])
def test_schedules_may_differ_by_rounding_and_no_more(off, fine):
    own = torch.linspace(1.0, 0.0, 5)
    own[3] += off
    if fine:
        check_samples(run(schedule=own), REQUEST, [sample()])
    else:
        with pytest.raises(TrustError, match="different noise schedules"):
            check_samples(run(schedule=own), REQUEST, [sample()])


def test_a_sample_without_trajectory_or_picture_has_nothing_to_compare():
    own = torch.linspace(1.0, 0.5, 5)
    check_samples(run(schedule=own), REQUEST, [sample(trajectory=None, media=None)])


@pytest.mark.parametrize("switch", ["parity", "transition", "known"])
def test_parity_is_not_asked_when_it_is_off_impossible_or_known(switch):
    made, said = parity_run({0: 1.0})
    made.recipe.trust.parity = switch != "parity"
    if switch == "transition":
        made.loss.needs = {Need.ROLLOUT, Need.OLD_PREDICTION}
    made.parity = ParityReport(by_step={}, rows=0) if switch == "known" else None
    prove_parity_once(made, [])
    assert said == []


@pytest.mark.parametrize(("worst", "fine"), [(1e-5, True), (1.01e-5, False)])
def test_parity_at_the_limit_passes_and_above_it_every_step_is_told(worst, fine):
    made, said = parity_run({2: worst, 5: 3e-6})
    if fine:
        prove_parity_once(made, [])
        assert said == ["parity: max |Δ log-prob| 1.00e-05 over 4 pairs (limit 1e-05)"]
        return
    with pytest.raises(TrustError) as refusal:
        prove_parity_once(made, [])
    assert "  step 2: 1.010e-05\n  step 5: 3.000e-06\n" in str(refusal.value)
    assert said == []
    assert made.parity is not None

"""Requests: seeds, microgroups, one step choice per group."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from drl.errors import ContractError
from drl.interfaces.steps import StepChoice, StepRequest, StepStrategy
from drl.stages.rollout import (
    choose_steps,
    evaluation_sampling,
    group_requests,
    training_sampling,
)
from drl.testing import make_prompt
from drl.types import Context, Sampling


class Fixed(StepStrategy):
    def __init__(self, choice: StepChoice) -> None:
        super().__init__(None, Context())
        self.choice = choice
        self.seen: list[StepRequest] = []

    def choose(self, request: StepRequest) -> StepChoice:
        self.seen.append(request)
        return self.choice


def recipe(**rollout):
    values = {"seed": 42, "n_samples_per_prompt": 5, "microgroup_size": 2, "shared_start": False}
    return SimpleNamespace(
        rollout=SimpleNamespace(**(values | rollout)),
        sampling=SimpleNamespace(
            num_steps=8,
            height=16,
            width=48,
            num_frames=1,
            fps=None,
            flow_shift=None,
            guidance_scale=1.0,
            guidance_scale_2=None,
            true_cfg_scale=None,
            negative_prompt=None,
            generator_device="cpu",
        ),
        sde=SimpleNamespace(type="cps", noise_level=0.7, log_prob_no_const=True, num_steps=3),
        eval=SimpleNamespace(num_steps=None),
        debug=SimpleNamespace(engine_debug=False),
    )


def requests(given, strategy=None, group=3):
    return group_requests(given, training_sampling(given), strategy, make_prompt(), group, 0)


def test_a_group_is_cut_into_microgroups_of_consecutive_seeds():
    parts = requests(recipe())
    assert [part.members for part in parts] == [(0, 1), (2, 3), (4,)]
    assert [seed for part in parts for seed in part.seeds] == [57, 58, 59, 60, 61]
    assert all(part.path_seeds is None for part in parts)


def test_seeds_of_different_groups_never_overlap():
    seen = [s for g in range(4) for part in requests(recipe(), group=g) for s in part.seeds]
    assert len(seen) == len(set(seen)) == 20


def test_seeds_do_not_depend_on_the_microgroup_size():
    flat = {
        size: [s for part in requests(recipe(microgroup_size=size)) for s in part.seeds]
        for size in (1, 2, 5)
    }
    assert flat[1] == flat[2] == flat[5]


def test_a_shared_start_has_one_seed_and_different_paths():
    parts = requests(recipe(shared_start=True))
    assert {seed for part in parts for seed in part.seeds} == {57}
    assert [s for part in parts for s in part.path_seeds] == [57, 58, 59, 60, 61]


def test_the_strategy_is_asked_once_per_group_with_the_groups_seed():
    strategy = Fixed(StepChoice(sde=(1, 2), kept=(1, 2, 3)))
    parts = requests(recipe(), strategy)
    assert [request.seed for request in strategy.seen] == [57]
    assert {part.sde_steps for part in parts} == {(1, 2)}
    assert {part.kept_latents for part in parts} == {(1, 2, 3)}


@pytest.mark.parametrize("sde", [(2, 1), (1, 1), (8,), (-1,)])
def test_steps_that_break_the_contract_are_refused(sde):
    with pytest.raises(ContractError, match="steps"):
        choose_steps(
            Fixed(StepChoice(sde=sde, kept=None)),
            StepRequest(num_steps=8, seed=0, group_index=0, rollout_id=0),
            2,
        )


def test_a_trained_step_without_its_successor_is_refused():
    with pytest.raises(ContractError, match="next one"):
        choose_steps(
            Fixed(StepChoice(sde=(1, 2), kept=(1, 2))),
            StepRequest(num_steps=8, seed=0, group_index=0, rollout_id=0),
            2,
        )


def test_evaluation_is_deterministic_and_has_its_own_step_count():
    given = recipe()
    given.eval.num_steps = 20
    sampling = evaluation_sampling(given)
    assert (sampling.sde_type, sampling.num_steps, sampling.noise_level) == ("ode", 20, 0.0)
    assert training_sampling(given).num_steps == 8


def test_a_bare_count_means_the_first_steps():
    (first, *_) = requests(recipe())
    assert first.sde_steps == (0, 1, 2)
    assert first.kept_latents == (0, 1, 2, 3)
    request = StepRequest(num_steps=2, seed=0, group_index=0, rollout_id=0)
    assert choose_steps(None, request, 5) == StepChoice(sde=(0, 1), kept=(0, 1, 2))


def test_a_rollout_asks_for_the_settings_of_the_recipe():
    given = recipe()
    given.sampling.flow_shift, given.sampling.true_cfg_scale = 3.0, 1.5
    given.sampling.negative_prompt, given.sampling.generator_device = "blurred", "cuda"
    shared = {
        "height": 16,
        "width": 48,
        "num_frames": 1,
        "flow_shift": 3.0,
        "guidance_scale": 1.0,
        "true_cfg_scale": 1.5,
        "negative_prompt": "blurred",
        "generator_device": "cuda",
    }
    assert training_sampling(given) == Sampling(
        **shared, num_steps=8, sde_type="cps", noise_level=0.7, log_prob_no_const=True
    )
    given.eval.num_steps = 40
    assert evaluation_sampling(given) == Sampling(
        **shared, num_steps=40, sde_type="ode", noise_level=0.0, log_prob_no_const=True
    )


@pytest.mark.parametrize(
    ("chosen", "kept", "said"),
    [
        ((1, 0), None, "numbers must ascend"),
        ((1, 1), None, "numbers must ascend"),
        ((-1,), None, "lie in the schedule"),
        ((8,), None, r"chose \(8,\) of 8 steps"),
        ((2,), (2,), r"trains steps \(2,\) but keeps latents \(2,\)"),
        ((2,), (3,), "its own latent and the next one"),
        ((0, 5), (0, 1, 5), "each trained step needs"),
    ],
)
def test_a_choice_that_no_trainer_could_use_is_refused_by_the_strategys_name(chosen, kept, said):
    request = StepRequest(num_steps=8, seed=0, group_index=0, rollout_id=0)
    strategy = Fixed(StepChoice(sde=chosen, kept=kept))
    with pytest.raises(ContractError, match=said) as refusal:
        choose_steps(strategy, request, 3)
    assert str(refusal.value).startswith("step strategy Fixed ")


@pytest.mark.parametrize(
    ("chosen", "kept"),
    [((0,), (0, 1)), ((7,), (7, 8)), ((0, 7), None), (None, None), ((), ()), ((1,), (5, 2, 1))],
)
def test_a_sound_choice_is_passed_on_as_it_is(chosen, kept):
    choice = StepChoice(sde=chosen, kept=kept)
    request = StepRequest(num_steps=8, seed=0, group_index=0, rollout_id=0)
    assert choose_steps(Fixed(choice), request, 3) is choice


@pytest.mark.parametrize(
    ("count", "steps", "kept"),
    [
        (0, (), (4,)),
        (1, (0,), (0, 1)),
        (3, (0, 1, 2), (0, 1, 2, 3)),
        (9, (0, 1, 2, 3), (0, 1, 2, 3, 4)),
    ],
)
def test_without_a_strategy_the_first_steps_and_the_latents_around_them_are_it(count, steps, kept):
    request = StepRequest(num_steps=4, seed=0, group_index=0, rollout_id=0)
    assert choose_steps(None, request, count) == StepChoice(sde=steps, kept=kept)


def test_options_of_videos_and_of_two_experts_reach_the_engine():
    given = recipe()
    given.sampling.fps, given.sampling.guidance_scale_2 = 16.0, 3.0
    for sampling in (training_sampling(given), evaluation_sampling(given)):
        assert (sampling.fps, sampling.guidance_scale_2) == (16.0, 3.0)


@pytest.mark.parametrize(
    ("first", "second", "true", "guided"),
    [
        (1.0, None, None, False),
        (1.0, 1.0, None, False),
        (1.0, 3.0, None, True),
        (4.0, 1.0, None, True),
        (4.0, 3.0, 1.0, False),
    ],
)
def test_guidance_is_on_when_one_of_the_experts_is_guided(first, second, true, guided):
    sampling = Sampling(
        num_steps=4,
        height=16,
        width=16,
        guidance_scale=first,
        guidance_scale_2=second,
        true_cfg_scale=true,
    )
    assert sampling.guided is guided

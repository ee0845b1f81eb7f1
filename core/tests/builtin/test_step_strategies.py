"""Step strategies: contracts, the choices of the reference, one window per group, refusals."""

from __future__ import annotations

from collections import Counter
from types import SimpleNamespace
from typing import Any, ClassVar

import numpy as np
import pytest
import torch

from drl.builtin.config_steps import EpochGlobalRandomChoiceOptions, SdeWindowOptions
from drl.builtin.step_strategies import drl_check_recipe
from drl.builtin.steps_all import AllSteps
from drl.builtin.steps_global import EpochGlobalRandomChoice
from drl.builtin.steps_last import OdeAndReturnLast
from drl.builtin.steps_window import SdeWindow
from drl.errors import BadInput
from drl.interfaces.steps import StepChoice, StepRequest
from drl.mathematics.seeding import group_seed
from drl.testing.contracts.step_strategy import StepStrategyContract
from drl.types import Context


class TestSdeWindowContract(StepStrategyContract):
    component = ("step_strategy", "sde_window")

    @pytest.fixture
    def impossible(self) -> tuple[dict[str, Any], str]:
        return {"range": (3, 11)}, "sde.sde_window.range"


class TestEpochGlobalRandomChoiceContract(StepStrategyContract):
    component = ("step_strategy", "epoch_global_random_choice")

    @pytest.fixture
    def option_values(self) -> dict[str, Any]:
        return {"candidate_steps": (8, 1, 5, 3)}

    @pytest.fixture
    def impossible(self) -> tuple[dict[str, Any], str]:
        return {"candidate_steps": (1, 10)}, "sde.epoch_global_random_choice.candidate_steps"


class TestAllContract(StepStrategyContract):
    component = ("step_strategy", "all")
    capabilities: ClassVar = {"refuses": False}


class TestOdeAndReturnLastContract(StepStrategyContract):
    component = ("step_strategy", "ode_and_return_last")
    capabilities: ClassVar = {"refuses": False, "stochastic": False}


def request(seed: int = 0, rollout_id: int = 0, num_steps: int = 10) -> StepRequest:
    return StepRequest(num_steps=num_steps, seed=seed, group_index=0, rollout_id=rollout_id)


def window(count: int, bounds: tuple[int, int] | None = None) -> SdeWindow:
    context = Context(section=SimpleNamespace(num_steps=count))
    return SdeWindow(SdeWindowOptions(range=bounds), context)


def choice(count: int, candidates: tuple[int, ...], seed: int = 42) -> EpochGlobalRandomChoice:
    context = Context(seed=seed, section=SimpleNamespace(num_steps=count))
    return EpochGlobalRandomChoice(
        EpochGlobalRandomChoiceOptions(candidate_steps=candidates), context
    )


def test_a_window_starts_where_numpys_pcg64_says() -> None:
    for seed in range(20):
        start = int(np.random.default_rng(seed).integers(1, 6))  # 1 .. 7 - 2
        expected = StepChoice(sde=(start, start + 1), kept=(start, start + 1, start + 2))
        assert window(2, (1, 7)).choose(request(seed)) == expected


def test_every_place_of_the_range_comes_equally_often() -> None:
    starts = Counter(window(3, (2, 8)).choose(request(seed)).sde[0] for seed in range(2000))  # type: ignore[index]
    assert sorted(starts) == [2, 3, 4, 5]
    assert all(count == pytest.approx(500, abs=80) for count in starts.values())


def test_without_a_range_the_window_may_lie_anywhere() -> None:
    starts = {window(9).choose(request(seed)).sde[0] for seed in range(50)}  # type: ignore[index]
    assert starts == {0, 1}
    assert window(10).choose(request()).sde == tuple(range(10))


def test_a_group_has_one_window_however_it_is_cut_into_microgroups() -> None:
    """The request holds the seed of the group; members and microgroups do not enter."""
    seeds = [group_seed(42, group, 8) for group in range(16)]
    assert len({window(2).choose(request(seed)).sde for seed in seeds}) > 1
    assert window(2).choose(request(seeds[3])) == window(2).choose(request(seeds[3], rollout_id=7))


@pytest.mark.parametrize(
    ("count", "bounds", "option"),
    [
        (0, None, "sde.num_steps"),
        (2, (5, 5), "sde.sde_window.range"),
        (2, (-1, 5), "sde.sde_window.range"),
        (2, (4, 2), "sde.sde_window.range"),
        (2, (0, 11), "sde.sde_window.range"),
        (4, (2, 5), "sde.sde_window.range"),
        (11, None, "sde.sde_window.range"),
    ],
)
def test_impossible_windows_are_refused_by_option(
    count: int, bounds: tuple[int, int] | None, option: str
) -> None:
    with pytest.raises(BadInput) as refusal:
        window(count, bounds).choose(request())
    assert str(refusal.value).startswith(f"{option} ")


def test_a_refusal_says_what_would_fit() -> None:
    with pytest.raises(BadInput, match=r"\[2, 5\] has room for 3 steps, but sde\.num_steps is 4"):
        window(4, (2, 5)).choose(request())


def test_a_global_choice_is_the_first_of_a_seeded_permutation() -> None:
    candidates = (7, 1, 4, 9)
    for rollout_id in range(10):
        generator = torch.Generator().manual_seed(rollout_id + 42)
        order = torch.randperm(4, generator=generator)[:2].tolist()
        expected = tuple(sorted(candidates[place] for place in order))
        assert choice(2, candidates).choose(request(rollout_id=rollout_id)).sde == expected


def test_all_groups_of_a_rollout_share_the_choice_and_rollouts_differ() -> None:
    strategy = choice(2, (1, 3, 5, 7, 9))
    for rollout_id in range(4):
        assert len({strategy.choose(request(seed, rollout_id)).sde for seed in range(20)}) == 1
    assert len({strategy.choose(request(0, rollout_id)).sde for rollout_id in range(20)}) > 3


def test_neighbouring_choices_share_the_latent_between_them() -> None:
    chosen = choice(3, (5, 1, 2)).choose(request())
    assert chosen == StepChoice(sde=(1, 2, 5), kept=(1, 2, 3, 5, 6))


def test_as_many_steps_as_candidates_takes_them_all_without_chance() -> None:
    chosen = {
        choice(count, (8, 1)).choose(request(rollout_id=r)).sde for count in (2, 5) for r in (0, 1)
    }
    assert chosen == {(1, 8)}


@pytest.mark.parametrize(
    ("count", "candidates", "message"),
    [
        (0, (1, 2), "sde.num_steps is 0"),
        (2, (), "has no safe default"),
        (2, (1, 10), r"holds \[10\]; steps are 0 to 9"),
        (2, (-1, 3), r"holds \[-1\]"),
        (2, (3, 3), "holds a step twice"),
    ],
)
def test_impossible_candidates_are_refused_by_option(
    count: int, candidates: tuple[int, ...], message: str
) -> None:
    with pytest.raises(BadInput, match=message):
        choice(count, candidates).choose(request())


def test_all_takes_every_step_and_keeps_every_latent() -> None:
    chosen = AllSteps(None, Context()).choose(request(num_steps=3))
    assert chosen == StepChoice(sde=(0, 1, 2), kept=None)


@pytest.mark.parametrize("steps", [1, 7])
def test_a_deterministic_rollout_keeps_the_final_latents_alone(steps: int) -> None:
    chosen = OdeAndReturnLast(None, Context()).choose(request(num_steps=steps))
    assert chosen == StepChoice(sde=(), kept=(steps,))


def recipe(strategy: str | None, options: object, count: int = 2) -> Any:
    return SimpleNamespace(
        sde=SimpleNamespace(step_strategy=strategy, num_steps=count),
        sampling=SimpleNamespace(num_steps=4),
        options=lambda kind, name: options,
    )


def test_the_recipe_check_knows_the_number_of_sampling_steps() -> None:
    good, bad = SdeWindowOptions(range=(0, 4)), SdeWindowOptions(range=(0, 9))
    assert list(drl_check_recipe(recipe("sde_window", good))) == []
    paths = [problem.path for problem in drl_check_recipe(recipe("sde_window", bad, count=0))]
    assert paths == ["sde.num_steps", "sde.sde_window.range"]
    candidates = EpochGlobalRandomChoiceOptions(candidate_steps=(1, 7))
    (problem,) = drl_check_recipe(recipe("epoch_global_random_choice", candidates))
    assert problem.path == "sde.epoch_global_random_choice.candidate_steps"
    assert "sampling.num_steps = 4" in problem.message


@pytest.mark.parametrize("strategy", [None, "all", "ode_and_return_last", "somebody_elses"])
def test_the_recipe_check_leaves_other_strategies_alone(strategy: str | None) -> None:
    assert list(drl_check_recipe(recipe(strategy, None, count=0))) == []

"""``StepStrategyContract``: what every choice of stochastic steps keeps."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from drl.catalog import Catalog
from drl.errors import BadInput
from drl.interfaces.steps import StepChoice, StepRequest, StepStrategy
from drl.testing.contracts.base import ContractBase
from drl.types import Context

NUM_STEPS = 10
REQUESTS = st.builds(
    StepRequest,
    num_steps=st.just(NUM_STEPS),
    seed=st.integers(0, 2**31 - 1),
    group_index=st.integers(0, 10**6),
    rollout_id=st.integers(0, 10**4),
)
# the fixtures hold no state that one example could leave to the next
PROPERTY = settings(
    max_examples=60,
    deadline=None,
    suppress_health_check=[
        HealthCheck.function_scoped_fixture,
        HealthCheck.differing_executors,
    ],
)


class StepStrategyContract(ContractBase):
    """Steps in range, ascending, unique, a function of the request; kept pairs are whole.

    The strategy is asked about samplers of 10 steps. ``section`` holds ``num_steps`` of the recipe's
    ``[sde]`` (2). The author overrides ``impossible``; capabilities ``refuses``: False when no
    request is impossible; ``stochastic``: False when no step is chosen.
    """

    @pytest.fixture
    def section(self) -> Any:
        """Two stochastic steps."""
        return SimpleNamespace(num_steps=2, type="sde", noise_level=0.7)

    @pytest.fixture
    def impossible(self) -> tuple[dict[str, Any], str]:
        """Option values that no 10-step request fits, and the option that the refusal names."""
        raise NotImplementedError(f"{type(self).__name__} must give the fixture impossible")

    @PROPERTY
    @given(request_=REQUESTS)
    def test_steps_are_in_range_ascending_and_unique(
        self, instance: StepStrategy, request_: StepRequest
    ) -> None:
        steps = steps_of(instance.choose(request_))
        assert list(steps) == sorted(set(steps))
        if self.capabilities.get("stochastic", True):
            assert steps
        assert set(steps) <= set(range(NUM_STEPS))

    @PROPERTY
    @given(request_=REQUESTS)
    def test_every_trained_step_has_its_latents_kept(
        self, instance: StepStrategy, request_: StepRequest
    ) -> None:
        choice = instance.choose(request_)
        if choice.kept is not None:
            assert list(choice.kept) == sorted(set(choice.kept))
            assert set(choice.kept) <= set(range(NUM_STEPS + 1))
            assert {n for s in steps_of(choice) for n in (s, s + 1)} <= set(choice.kept)

    @PROPERTY
    @given(request_=REQUESTS)
    def test_the_same_request_gives_the_same_choice(
        self,
        catalog: Catalog,
        options: Any,
        context: Context,
        instance: StepStrategy,
        request_: StepRequest,
    ) -> None:
        first = instance.choose(request_)
        again = catalog.create(*self.component, options, context).choose(request_)
        assert first == again == instance.choose(request_)

    def test_global_random_state_is_left_alone(self, instance: StepStrategy) -> None:
        before = (torch.get_rng_state(), np.random.get_state()[1].tolist())  # type: ignore[index]
        instance.choose(StepRequest(num_steps=NUM_STEPS, seed=3, group_index=1, rollout_id=1))
        after = (torch.get_rng_state(), np.random.get_state()[1].tolist())  # type: ignore[index]
        assert torch.equal(before[0], after[0])
        assert before[1] == after[1]

    def test_an_impossible_request_is_refused_by_the_name_of_the_option(
        self, request: pytest.FixtureRequest, catalog: Catalog, context: Context
    ) -> None:
        self.require("refuses")
        values, option = request.getfixturevalue("impossible")
        model = catalog.options_model(*self.component)
        made = catalog.create(*self.component, model and model.model_validate(values), context)
        with pytest.raises(BadInput) as refusal:
            made.choose(StepRequest(num_steps=NUM_STEPS, seed=0, group_index=0, rollout_id=0))
        assert option in str(refusal.value)


def steps_of(choice: StepChoice) -> tuple[int, ...]:
    """Return the stochastic steps of a choice; None means all."""
    return choice.sde if choice.sde is not None else tuple(range(NUM_STEPS))

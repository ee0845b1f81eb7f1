"""Work of samples and pairs whose rows differ: in size, in component, in what the family knows."""

from __future__ import annotations

from collections import Counter
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from drl.interfaces.family import Flops, Route, RowShape
from drl.observe.work import WorkCounter, row_shape
from drl.types import ConditionRecord, Sample, Trajectory


class Phased:
    """A high and a low component, parted at timestep 500; a row costs its pixels times its tokens."""

    components = ("high", "low")
    streams = ("visual",)

    def component_config(self, component: str, checkpoint: str) -> dict[str, Any]:
        return {"scale": 3.0 if component == "high" else 1.0, "from": checkpoint}

    def flops(self, component: str, config: Any, shape: RowShape) -> Flops | None:
        assert config["from"] == "somewhere"
        if shape.text_tokens == 0:
            return None
        forward = config["scale"] * shape.latent[-1] * shape.text_tokens
        return Flops(forward=forward, backward=2 * forward, input_gradient=forward)

    def layer_rows(self, component: str, config: Any, shape: RowShape, layer: str) -> int | None:
        return None

    def route(self, timestep: float) -> Route:
        return Route(component="high" if timestep >= 500 else "low")


def counter(branches: int = 1, **changed: Any) -> WorkCounter:
    loss: Any = SimpleNamespace(needs=frozenset(), rows_per_pair=1, recomputes_old_log_prob=False)
    family: Any = Phased()
    return WorkCounter(
        family=family,
        loss=loss,
        components={},
        checkpoint="somewhere",
        branches=branches,
        **changed,
    )


def sample(width: int, tokens: int, *times: float) -> Sample:
    prompt: Any = None
    return Sample(
        index=0,
        group_index=0,
        member=0,
        prompt=prompt,
        seed=0,
        condition=ConditionRecord(tensors={"encoder_hidden_states": torch.zeros(tokens, 4)}),
        trajectory=Trajectory(
            latents={"visual": torch.zeros(2, 4, 2, width)},
            latent_steps=(0, len(times)),
            sigmas=torch.zeros(len(times) + 1),
            timesteps=torch.tensor(times),
            log_probs=torch.zeros(len(times)),
            sde_steps=(),
        ),
    )


def test_each_step_costs_what_its_component_costs() -> None:
    assert counter().samples([sample(8, 5, 900.0, 700.0, 100.0)]) == (3 + 3 + 1) * 8 * 5


def test_samples_of_other_sizes_and_texts_cost_what_they_are() -> None:
    samples = [sample(8, 5, 100.0), sample(16, 5, 100.0), sample(8, 7, 100.0)]
    assert counter(branches=2).samples(samples) == 2 * (8 * 5 + 16 * 5 + 8 * 7)


def test_a_sample_without_trajectory_or_text_has_no_known_work() -> None:
    bare = sample(8, 5, 100.0)
    bare.trajectory = None
    assert counter().samples([sample(8, 5, 100.0), bare]) is None
    textless = sample(8, 5, 100.0)
    textless.condition = ConditionRecord(tensors={"other": torch.zeros(3)})
    assert counter().samples([textless]) is None
    assert counter().samples([sample(8, 0, 100.0)]) is None


def test_no_samples_are_no_work() -> None:
    assert counter().samples([]) == 0.0
    assert counter().pairs(Counter(), Counter()) == 0.0


def test_pairs_cost_by_component_and_size() -> None:
    small, large = (
        RowShape(latent=(4, 2, 8), text_tokens=5),
        RowShape(latent=(4, 2, 16), text_tokens=5),
    )
    pairs = Counter({("high", small): 2, ("low", large): 3})
    assert counter().pairs(pairs, Counter()) == 3 * (2 * 3 * 8 * 5 + 3 * 1 * 16 * 5)
    alone = counter(trained=False).pairs(pairs, Counter())
    assert alone == 2 * 3 * 8 * 5 + 3 * 1 * 16 * 5


def test_one_unknown_size_makes_all_of_it_unknown() -> None:
    known, unknown = (
        RowShape(latent=(4, 2, 8), text_tokens=5),
        RowShape(latent=(4, 2, 8), text_tokens=0),
    )
    assert counter().pairs(Counter({("low", known): 1, ("low", unknown): 1}), Counter()) is None


def test_a_row_is_its_latents_and_the_length_of_its_text() -> None:
    record = ConditionRecord(
        tensors={"encoder_hidden_states": torch.zeros(11, 4), "pooled": torch.zeros(6)}
    )
    shape = row_shape(torch.zeros(16, 1, 8, 8), record)
    assert shape == RowShape(latent=(16, 1, 8, 8), text_tokens=11)
    assert row_shape(torch.zeros(16, 8, 8), None) is None


@pytest.mark.parametrize("component", ["high", "low"])
def test_full_training_is_three_forwards(component: str) -> None:
    work = counter().row(component, RowShape(latent=(4, 2, 8), text_tokens=5))
    assert work is not None
    assert work.training == 3 * work.forward
    assert work.adapters == 0.0

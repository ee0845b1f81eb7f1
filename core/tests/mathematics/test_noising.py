"""Noise by pair and the latents between data and noise."""

from __future__ import annotations

import pytest
import torch

from drl.mathematics.noising import (
    logit_normal_level,
    noised,
    noised_with_targets,
    pair_noise,
    shifted,
    squared_distance,
    target_of,
    velocity_error,
)
from drl.stages.loss import make_batch
from drl.types import Pair, StepContext

CPU = torch.device("cpu")


def pair(*ids: int) -> Pair:
    return Pair(id=ids, unit=ids[0], sigma=0.5, weight=1.0, tensors={"visual": torch.zeros(2, 3)})


def test_noise_belongs_to_the_pair_not_to_its_place_or_neighbours() -> None:
    context = StepContext(seed=7)
    both = pair_noise(make_batch([pair(1, 0), pair(2, 0)], CPU), context, "test")["visual"]
    turned = pair_noise(make_batch([pair(2, 0), pair(1, 0)], CPU), context, "test")["visual"]
    alone = pair_noise(make_batch([pair(2, 0)], CPU), context, "test")["visual"]
    assert torch.equal(both, turned.flip(0))
    assert torch.equal(both[1:], alone)
    expected = torch.randn(2, 3, generator=context.generator("test", 2, 0))
    assert torch.equal(alone[0], expected)


def test_seed_purpose_and_id_each_change_the_noise() -> None:
    batch = make_batch([pair(1, 0)], CPU)
    first = pair_noise(batch, StepContext(seed=7), "test")["visual"]
    others = (
        pair_noise(batch, StepContext(seed=8), "test"),
        pair_noise(batch, StepContext(seed=7), "other"),
        pair_noise(make_batch([pair(1, 1)], CPU), StepContext(seed=7), "test"),
    )
    assert not any(torch.equal(first, other["visual"]) for other in others)


def test_each_row_lies_between_data_and_noise_at_its_own_sigma() -> None:
    clean, noise = torch.full((3, 1, 2), 4.0), torch.full((3, 1, 2), -8.0)
    got = noised(clean, noise, torch.tensor([0.0, 0.25, 1.0]))
    assert got[:, 0, 0].tolist() == [4.0, 1.0, -8.0]


def test_targets_are_noise_minus_data() -> None:
    context, batch = StepContext(seed=7), make_batch([pair(1, 0), pair(2, 0)], CPU)
    inputs = noised_with_targets(batch, context, "test")
    noise = pair_noise(batch, context, "test")["visual"]
    assert torch.equal(inputs.extras[target_of("visual")], noise - batch.tensors["visual"])
    assert torch.equal(inputs.streams["visual"], 0.5 * noise)
    assert set(inputs.extras) == {"visual.target"}


def test_the_error_of_a_velocity_is_a_mean_over_elements_and_a_sum_over_streams() -> None:
    one = {"a": torch.tensor([[1.0, 3.0]], requires_grad=True), "b": torch.tensor([[2.0]])}
    other = {"a": torch.tensor([[0.0, 1.0]], requires_grad=True), "b": torch.tensor([[5.0]])}
    distance = squared_distance(one, other)
    assert distance.tolist() == [(1 + 4) / 2 + 9]
    distance.sum().backward()
    assert one["a"].grad is not None
    assert one["a"].grad.tolist() == [[1.0, 2.0]]
    assert other["a"].grad is None, "what is compared with has no gradient"
    batch = make_batch([pair(1, 0)], CPU)
    inputs = noised_with_targets(batch, StepContext(), "test")
    exact = {"visual": inputs.extras[target_of("visual")]}
    assert velocity_error(exact, inputs).tolist() == [0.0]
    assert velocity_error({"visual": exact["visual"] + 2.0}, inputs).tolist() == [4.0]


def test_a_shift_moves_levels_up_and_leaves_the_ends() -> None:
    assert shifted(0.5, 3.0) == pytest.approx(0.75)  # 1.5 / 2
    levels = torch.tensor([0.0, 0.25, 1.0], dtype=torch.float64)
    assert shifted(levels, 3.0).tolist() == pytest.approx([0.0, 0.5, 1.0])
    assert torch.equal(shifted(levels, 1.0), levels)


def test_a_logit_normal_level_is_the_sigmoid_of_one_normal_draw() -> None:
    z = float(torch.randn((), generator=torch.Generator().manual_seed(4)).double())
    level = logit_normal_level(torch.Generator().manual_seed(4))
    assert level / (1 - level) == pytest.approx(torch.tensor(z).exp().item())

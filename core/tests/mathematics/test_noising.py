"""Noise by pair and the latents between data and noise."""

from __future__ import annotations

import torch

from drl.mathematics.noising import noised, pair_noise
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

"""Seeds: functions of purpose and ids, the integers of the engine protocol."""

from __future__ import annotations

import itertools

import pytest
import torch

from drl.mathematics.seeding import (
    evaluation_seed,
    generator,
    group_seed,
    sample_seed,
    stream_seed,
)
from drl.types import Context


def test_a_generator_gives_the_same_numbers_whenever_it_is_made() -> None:
    first, second = (torch.randn(5, generator=generator(1234, "noise", 7, 2)) for _ in range(2))
    assert torch.equal(first, second)


def test_seed_values_never_change() -> None:
    """A resumed run and a published result hang on these."""
    assert stream_seed(0, "sft_noise", 1) == 1020546511007407678
    assert stream_seed(1234, "noise", 7, 2) == 8203706862836814302


@pytest.mark.parametrize(
    "other", [(2, "noise", 7, 3), (1, "other", 7, 3), (1, "noise", 7, 4), (1, "noise", 73)]
)
def test_seed_purpose_and_every_id_matter(other: tuple[int, str, *tuple[int, ...]]) -> None:
    assert stream_seed(*other) != stream_seed(1, "noise", 7, 3)


def test_seeds_have_63_bits() -> None:
    seeds = [stream_seed(seed, "x", number) for seed in range(30) for number in range(30)]
    assert len(set(seeds)) == 900
    assert all(0 <= seed < 2**63 for seed in seeds)
    assert max(seeds) > 2**62


def test_global_random_state_is_left_alone() -> None:
    before = torch.get_rng_state()
    torch.randn(3, generator=generator(0, "noise", 1))
    assert torch.equal(before, torch.get_rng_state())


def test_noise_depends_on_ids_and_never_on_rank() -> None:
    """1, 2 and 4 workers make the same set of noises, all distinct."""

    def noises(world: int) -> list[float]:
        contexts = [Context(rank=rank, world=world, seed=9) for rank in range(world)]
        dealt = [
            (pair, float(torch.randn((), generator=contexts[pair % world].generator("n", pair))))
            for pair in range(16)
        ]
        return [noise for _, noise in sorted(dealt)]

    assert noises(1) == noises(2) == noises(4)
    assert len(set(noises(4))) == 16


def test_sample_seeds_are_those_of_the_engine_protocol() -> None:
    assert sample_seed(42, 0, 4, 0) == 42
    assert sample_seed(42, 3, 4, 2) == 42 + 12 + 2
    assert sample_seed(2**31 - 1, 1, 4, 3) == (2**31 - 1 + 4 - 2**31) + 3
    assert group_seed(42, 3, 4) == sample_seed(42, 3, 4, 0)


@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_microgroups_do_not_change_sample_seeds(size: int) -> None:
    """A server expands the seed of a microgroup to seed, seed + 1, ..."""
    expanded = [
        sample_seed(42, 5, 4, first) + position
        for first in range(0, 4, size)
        for position in range(min(size, 4 - first))
    ]
    assert expanded == [sample_seed(42, 5, 4, member) for member in range(4)]


def test_no_two_samples_of_a_run_share_a_seed() -> None:
    seeds = [sample_seed(42, *place) for place in itertools.product(range(50), [8], range(8))]
    assert len(set(seeds)) == 400


def test_evaluation_seeds_are_the_same_for_every_prompt() -> None:
    assert [evaluation_seed(1000, member) for member in range(3)] == [1000, 1001, 1002]

"""The random numbers of training: a stream of its own, a file per rank."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch

from drl.checkpoint.rng import (
    TrainingRandomness,
    apply,
    capture,
    read_rng,
    rng_file,
    seeded,
    write_rng,
)
from drl.errors import CheckpointError

CPU = torch.device("cpu")


def draw():
    """Return numbers of every global generator, Gaussian ones with a cached second too."""
    return (
        torch.rand(3).tolist(),
        random.random(),
        random.gauss(0, 1),
        np.random.rand(),
        np.random.randn(),
    )


@pytest.fixture(autouse=True)
def as_before():
    state = capture(CPU)
    yield
    apply(state, CPU)


def test_every_generator_repeats_itself_after_a_file(tmp_path):
    draw()
    write_rng(capture(CPU), tmp_path, 3)
    wanted = [draw() for _ in range(3)]
    draw()
    state = read_rng(tmp_path, 3)
    assert state is not None
    apply(state, CPU)
    assert [draw() for _ in range(3)] == wanted


def test_a_half_used_gaussian_pair_survives(tmp_path):
    """Both legacy generators make Gaussians in pairs and keep the second one."""
    random.gauss(0, 1)
    np.random.randn()
    write_rng(capture(CPU), tmp_path, 0)
    wanted = (random.gauss(0, 1), np.random.randn())
    apply(read_rng(tmp_path, 0), CPU)
    assert (random.gauss(0, 1), np.random.randn()) == wanted


def test_the_file_is_safetensors_without_code(tmp_path):
    write_rng(capture(CPU), tmp_path, 12)
    content = rng_file(tmp_path, 12).read_bytes()
    assert rng_file(tmp_path, 12).name == "rank_00012.safetensors"
    assert content[8:9] == b"{"
    assert b"python_version" in content[:2000]


def test_a_rank_without_a_file_is_none(tmp_path):
    write_rng(capture(CPU), tmp_path, 0)
    assert read_rng(tmp_path, 1) is None


@pytest.mark.parametrize("content", [b"", b"{", b"\0" * 200])
def test_a_damaged_file_is_named_with_the_way_out(tmp_path, content):
    rng_file(tmp_path, 0).parent.mkdir()
    rng_file(tmp_path, 0).write_bytes(content)
    with pytest.raises(CheckpointError, match=r"rank_00000.*checkpoint\.load_rng = false"):
        read_rng(tmp_path, 0)


def test_seeding_leaves_the_generators_alone():
    state = capture(CPU)
    wanted = draw()
    apply(state, CPU)
    seeded(7, CPU)
    assert draw() == wanted


def test_the_stream_is_a_function_of_seed_and_rank():
    def first(seed, rank):
        made = TrainingRandomness(seed, rank, CPU)
        torch.manual_seed(hash((seed, rank)) % 1000)  # what was there does not matter
        with made.in_place():
            return draw()

    assert first(1, 0) == first(1, 0)
    assert len({str(first(seed, rank)) for seed in (1, 2) for rank in (0, 1, 2)}) == 6


def test_nothing_outside_shifts_the_stream_and_it_shifts_nothing_outside():
    made, other = TrainingRandomness(1, 0, CPU), TrainingRandomness(1, 0, CPU)
    outside = capture(CPU)
    wanted_outside = [draw() for _ in range(2)]
    apply(outside, CPU)
    inside, seen = [], []
    for _ in range(2):
        with made.in_place():
            inside.append(draw())
        seen.append(draw())
    with other.in_place():
        assert [draw() for _ in range(2)] == inside
    assert seen == wanted_outside


def test_an_error_inside_puts_the_outer_numbers_back():
    made = TrainingRandomness(1, 0, CPU)
    outside = capture(CPU)
    wanted = draw()
    apply(outside, CPU)

    def fail():
        with made.in_place():
            draw()
            raise RuntimeError

    with pytest.raises(RuntimeError):
        fail()
    assert draw() == wanted

"""The fingerprint sees any bit that changes, wherever it lies, and depends on nothing else."""

from __future__ import annotations

import pytest
import torch

from drl.mathematics.checksum import COLUMNS, tensors_fingerprint


def weights(count=3 * COLUMNS + 5, dtype=torch.float32, seed=0):
    return torch.randn(count, generator=torch.Generator().manual_seed(seed)).to(dtype)


def print_of(*tensors):
    return tensors_fingerprint([f"w{n}" for n in range(len(tensors))], tensors)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("place", [0, 1, COLUMNS, 2 * COLUMNS + 7, 3 * COLUMNS, 3 * COLUMNS + 4])
def test_one_changed_value_shows(dtype, place):
    before = weights(dtype=dtype)
    after = before.clone()
    after[place] = torch.nextafter(after[place].float(), torch.tensor(9.0)).to(dtype)
    if torch.equal(before, after):
        after[place] = after[place] * 1.01
    assert print_of(before) != print_of(after)


@pytest.mark.parametrize(
    ("left", "right"), [(0, 1), (0, COLUMNS), (3, 2 * COLUMNS + 3), (5, 3 * COLUMNS + 1)]
)
def test_two_values_that_change_places_show(left, right):
    before = weights()
    after = before.clone()
    after[[left, right]] = before[[right, left]]
    assert print_of(before) != print_of(after)


def test_order_of_arguments_and_memory_layout_do_not_matter():
    a, b = weights(64, seed=1), weights(64, seed=2).view(8, 8)
    assert tensors_fingerprint(["a", "b"], [a, b]) == tensors_fingerprint(["b", "a"], [b, a])
    assert print_of(b) == print_of(b.t().contiguous().t())


def test_name_shape_and_dtype_count():
    a = torch.zeros(6)
    prints = {
        tensors_fingerprint(["a"], [a]),
        tensors_fingerprint(["b"], [a]),
        tensors_fingerprint(["a"], [a.view(2, 3)]),
        tensors_fingerprint(["a"], [a.bfloat16()]),
    }
    assert len(prints) == 4


@pytest.mark.parametrize("tensor", [torch.zeros(0), torch.tensor(1.0), torch.tensor([True, False])])
def test_odd_tensors_have_a_fingerprint(tensor):
    assert print_of(tensor) == print_of(tensor.clone())


def test_nothing_has_one_too():
    assert tensors_fingerprint([], []) == tensors_fingerprint([], [])

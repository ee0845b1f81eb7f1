"""The fingerprint sees any bit that changes, wherever it lies, and depends on nothing else."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from drl.mathematics import checksum
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


@settings(max_examples=80, deadline=None)
@given(st.integers(0, 2 * COLUMNS + 9), st.integers(0, 31))
def test_any_single_bit_shows_wherever_it_lies(place: int, bit: int) -> None:
    before = torch.zeros(2 * COLUMNS + 10, dtype=torch.int32)
    after = before.clone()
    after[place] = -(2**31) if bit == 31 else 1 << bit
    assert print_of(before) != print_of(after)
    assert print_of(before.view(torch.float32)) != print_of(after.view(torch.float32))


def test_places_in_the_last_row_are_told_from_those_of_whole_rows() -> None:
    marks = [0, 1, COLUMNS, COLUMNS + 1, 2 * COLUMNS, 2 * COLUMNS + 1]
    prints = set()
    for place in marks:
        values = torch.zeros(2 * COLUMNS + 3, dtype=torch.int64)
        values[place] = 7
        prints.add(print_of(values))
    assert len(prints) == len(marks)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("apart", [1, 2, 4, 8, COLUMNS, 2 * COLUMNS, 8 * COLUMNS])
def test_two_signs_that_change_show(dtype, apart):
    before = torch.ones(9 * COLUMNS + 16, dtype=dtype)
    for first in range(8):
        after = before.clone()
        after[[first, first + apart]] *= -1
        assert print_of(before) != print_of(after), first
        one, other = before.clone(), before.clone()
        one[first] *= -1
        other[first + apart] *= -1
        assert print_of(one) != print_of(other), first


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("count", [8, 16, 64, 1536, COLUMNS, 8 * COLUMNS])
@pytest.mark.parametrize("values", [torch.ones, torch.rand])
def test_any_set_of_signs_that_change_shows(dtype, count, values):
    before = (
        values(count, generator=torch.Generator().manual_seed(0))
        if values is torch.rand
        else values(count)
    )
    before = before.to(dtype)
    every = torch.arange(count)
    sets = [every % step == place for step in (1, 2, 4, 8) for place in range(step)]
    sets += [
        (every == 0) | (every == a) | (every == b) | (every == a + b) for a, b in ((1, 4), (2, 4))
    ]
    sets += [torch.isin(every, torch.tensor([1, 3, 9, 11]) % count)]
    prints = {print_of(before)} | {print_of(torch.where(some, -before, before)) for some in sets}
    assert len(prints) == 1 + len({tuple(some.nonzero().flatten().tolist()) for some in sets})


@pytest.mark.parametrize(
    "view", [lambda t: t[::2], lambda t: t[:1].expand(64), lambda t: t.view(8, -1)[:, 0]]
)
def test_a_tensor_alone_may_have_any_strides(view):
    part = view(weights(64))
    assert print_of(part) == print_of(part.contiguous())
    assert checksum.tensors_digest(["w"], [part]) == checksum.tensors_digest(
        ["w"], [part.contiguous()]
    )


@pytest.mark.parametrize("dtype", [torch.int8, torch.bool, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("count", [1, 3, 7, 8, 9, 4095, 4097])
@pytest.mark.parametrize("start", [0, 1, 2, 3])
def test_a_tensor_counts_by_its_bytes_wherever_it_lies_in_memory(dtype, count, start):
    memory = weights(count + start).to(dtype)
    part = memory[start:]
    fresh = torch.empty_like(part).copy_(part)
    assert print_of(part) == print_of(fresh)
    assert print_of(part, memory) == print_of(fresh, memory)


def test_words_are_bytes_and_zeros_up_to_a_whole_one() -> None:
    bits = checksum.words(
        [torch.tensor([1, 2], dtype=torch.int8), torch.tensor([3]).to(torch.int8)]
    )
    assert bits.tolist() == [1 + (2 << 8) + (3 << 16)]
    whole = torch.arange(4, dtype=torch.int32)
    assert checksum.words([whole]).data_ptr() == whole.data_ptr()
    assert checksum.words([whole[1:3]]).tolist() == [1 + (2 << 32)]
    plain, *_ = checksum.bit_sums([torch.tensor([5, -1], dtype=torch.int32)])
    word = 5 - (1 << 32)  # the upper half is -1
    assert plain.item() == 3 * (word - 3)


def test_large_sums_wrap_and_still_tell_apart() -> None:
    full = torch.full((3 * COLUMNS,), -1, dtype=torch.int64)
    other = full.clone()
    other[-1] = 2**63 - 1
    assert print_of(full) != print_of(other)
    assert print_of(full.to(torch.int8)) != print_of(other.to(torch.int8).fill_(127))


def test_names_without_tensors_and_the_other_way_round_are_refused() -> None:
    with pytest.raises(ValueError):
        tensors_fingerprint(["a", "b"], [weights(3)])
    with pytest.raises(ValueError):
        tensors_fingerprint(["a"], [weights(3), weights(3)])
    assert len(tensors_fingerprint([], [])) == 64


def test_equal_names_may_repeat_in_any_order_of_tensors_that_are_equal() -> None:
    twins = [weights(5), weights(5)]
    assert tensors_fingerprint(["a", "a"], twins) == tensors_fingerprint(["a", "a"], twins[::-1])

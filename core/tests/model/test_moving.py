"""Tensors that get other memory stay the objects they were, and go on sharing what they shared."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from drl.model.moving import move


def test_bits_stay_and_memory_is_another() -> None:
    odd = [
        torch.randn(5, 7).t(),
        torch.randn(6)[::2],
        torch.tensor([True, False]),
        torch.tensor(float("nan")),
        torch.zeros(0, 3),
        nn.Parameter(torch.randn(4).bfloat16()),
    ]
    before = [tensor.detach().clone() for tensor in odd]
    facts = [(tensor.shape, tensor.stride(), tensor.dtype) for tensor in odd]
    places = [tensor.data_ptr() for tensor in odd]
    move(odd, "cpu")
    for tensor, old in zip(odd, before, strict=True):
        assert torch.equal(tensor.nan_to_num(7.0), old.nan_to_num(7.0))
    assert facts == [(tensor.shape, tensor.stride(), tensor.dtype) for tensor in odd]
    assert all(a != b.data_ptr() for a, b in zip(places, odd, strict=True) if a)


def test_what_was_shared_is_shared_afterwards() -> None:
    whole = torch.arange(12.0)
    view, other = whole[3:9].view(2, 3), whole.view(3, 4).t()
    apart = torch.zeros(3)
    move([view, whole, other, apart], "cpu")
    whole[4] = -1.0
    assert view[0, 1] == -1.0
    assert other[0, 1] == -1.0
    assert torch.equal(apart, torch.zeros(3))


def test_tied_weights_stay_tied() -> None:
    first, second = nn.Linear(3, 3, bias=False), nn.Linear(3, 3, bias=False)
    second.weight = first.weight
    move([first.weight, second.weight], "cpu")
    assert second.weight is first.weight
    with torch.no_grad():
        first.weight.fill_(2.0)
    assert torch.equal(second.weight, torch.full((3, 3), 2.0))


def test_a_view_that_stays_behind_keeps_its_values() -> None:
    whole = torch.ones(4)
    behind = whole[:2]
    move([whole], "cpu")
    whole.zero_()
    assert torch.equal(behind, torch.ones(2))


def test_nothing_moves_when_the_second_half_has_no_room() -> None:
    small, huge = torch.ones(3), torch.ones(1).expand(3)
    places = small.data_ptr(), huge.data_ptr()
    with pytest.raises(RuntimeError):
        move([small, huge, torch.empty(2, device="meta")], "cpu")
    assert (small.data_ptr(), huge.data_ptr()) == places

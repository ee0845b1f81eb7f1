"""Fused layers: q, k and v in one matrix, exactly there and back."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from drl.formats.adapter import AdapterLayer
from drl.formats.fused import fuse, split

MakeLayer = Callable[..., AdapterLayer]


def delta(layer: AdapterLayer) -> torch.Tensor:
    B, A = layer.factors()
    return B @ A


def test_by_hand() -> None:
    q = AdapterLayer(A=torch.tensor([[1.0, 2.0]]), B=torch.tensor([[3.0]]), alpha=2)
    k = AdapterLayer(A=torch.tensor([[5.0, 7.0]]), B=torch.tensor([[11.0], [13.0]]), alpha=2)
    whole = fuse([q, k], [1, 2])
    assert whole.A.tolist() == [[1, 2], [5, 7]]
    assert whole.B.tolist() == [[3, 0], [0, 11], [0, 13]]
    assert (whole.rank, whole.alpha, whole.scale) == (2, 4, 2)
    # 2 * [3 * (1, 2); 11 * (5, 7); 13 * (5, 7)]
    assert delta(whole).tolist() == [[6, 12], [110, 154], [130, 182]]


def test_split_cuts_rows_and_repeats_a() -> None:
    A, B = torch.randn(3, 4), torch.randn(6, 3)
    parts = split(AdapterLayer(A=A, B=B, alpha=6), [2, 2, 2])
    for number, part in enumerate(parts):
        assert part is not None
        assert torch.equal(part.A, A)
        assert torch.equal(part.B, B[2 * number : 2 * number + 2])
        assert (part.rank, part.scale) == (3, 2)


@pytest.mark.parametrize("alphas", [(4.0, 4.0, 4.0), (4.0, 2.0, 7.0)])
def test_what_was_fused_comes_back(make_layer: MakeLayer, alphas: tuple[float, ...]) -> None:
    parts = [make_layer((8, 5), alpha=alpha, seed=n) for n, alpha in enumerate(alphas)]
    back = split(fuse(parts, [8, 8, 8]), [8, 8, 8])
    for part, again in zip(parts, back, strict=True):
        assert again is not None
        assert again.rank == part.rank
        torch.testing.assert_close(delta(again), delta(part), rtol=0, atol=1e-6)
    if len(set(alphas)) == 1:
        for part, again in zip(parts, back, strict=True):
            assert again is not None
            assert torch.equal(part.A, again.A)
            assert torch.equal(part.B, again.B)
            assert part.alpha == again.alpha


def test_parts_that_have_no_adapter_stay_without(make_layer: MakeLayer) -> None:
    only = make_layer((8, 5), alpha=3.0)
    whole = fuse([None, only, None], [8, 8, 4])
    assert whole.B.shape == (20, 2)
    assert whole.alpha == 3.0
    none, again, last = split(whole, [8, 8, 4])
    assert none is None
    assert last is None
    assert again is not None
    assert torch.equal(again.B, only.B)


def test_ranks_may_differ(make_layer: MakeLayer) -> None:
    parts = [make_layer((4, 6), rank=rank, alpha=2.0 * rank, seed=rank) for rank in (1, 2, 3)]
    whole = fuse(parts, [4, 4, 4])
    assert (whole.rank, whole.scale) == (6, 2)
    assert [part.rank for part in split(whole, [4, 4, 4]) if part is not None] == [1, 2, 3]


def test_an_adapter_that_is_still_zero_keeps_all_its_parts() -> None:
    blank = AdapterLayer(A=torch.randn(2, 4), B=torch.zeros(6, 2), alpha=2)
    assert [part.rank for part in split(blank, [3, 3]) if part is not None] == [2, 2]


def test_half_precision_keeps_its_dtype(make_layer: MakeLayer) -> None:
    half = [
        AdapterLayer(A=one.A.bfloat16(), B=one.B.bfloat16(), alpha=one.alpha)
        for one in (make_layer((4, 4), seed=1), make_layer((4, 4), alpha=3.0, seed=2))
    ]
    whole = fuse(half, [4, 4])
    assert (whole.A.dtype, whole.B.dtype) == (torch.bfloat16, torch.bfloat16)

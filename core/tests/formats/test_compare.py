"""Differences of adapters, against matrices formed by hand."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch

from drl.formats.adapter import Adapter, AdapterLayer
from drl.formats.compare import compare, delta_norm, strengths

MakeLayer = Callable[..., AdapterLayer]


def one(layer: AdapterLayer, path: str = "x") -> Adapter:
    return Adapter(components={"transformer": {path: layer}})


def test_a_norm_by_hand() -> None:
    # scale 2, B A = (3, 4) outer (1, 2): Frobenius norm 5 * sqrt(5), times 2
    layer = AdapterLayer(A=torch.tensor([[1.0, 2.0]]), B=torch.tensor([[3.0], [4.0]]), alpha=2.0)
    assert delta_norm(layer) == pytest.approx(10 * math.sqrt(5))


@pytest.mark.parametrize("shape", [(40, 30), (3, 50), (50, 3), (8, 3, 3, 3)])
@pytest.mark.parametrize("rank", [1, 4])
def test_norms_are_those_of_the_whole_matrix(
    make_layer: MakeLayer, shape: tuple[int, ...], rank: int
) -> None:
    layer = make_layer(shape, rank=rank, alpha=3.0)
    B, A = layer.factors()
    assert delta_norm(layer) == pytest.approx(torch.linalg.matrix_norm(B @ A).item(), rel=1e-12)


@pytest.mark.parametrize("ranks", [(1, 1), (2, 5), (5, 2)])
def test_a_difference_is_that_of_the_whole_matrices(
    make_layer: MakeLayer, ranks: tuple[int, int]
) -> None:
    first, second = (make_layer((40, 30), rank=r, seed=n) for n, r in enumerate(ranks))
    (B, A), (D, C) = first.factors(), second.factors()
    wanted = torch.linalg.matrix_norm(B @ A - D @ C) / torch.linalg.matrix_norm(B @ A)
    (line,) = compare(one(first), one(second))
    assert line.relative == pytest.approx(wanted.item(), rel=1e-9)


def test_the_same_update_in_other_factors_is_no_difference(make_layer: MakeLayer) -> None:
    layer = make_layer((40, 30), rank=3, alpha=3.0)
    mixing = torch.tensor([[2.0, 1.0, 0.0], [0.0, 1.0, 0.0], [0.0, 0.0, 4.0]])
    other = AdapterLayer(A=mixing @ layer.A, B=layer.B @ torch.linalg.inv(mixing), alpha=3.0)
    (line,) = compare(one(layer), one(other))
    assert line.relative < 1e-6
    half = AdapterLayer(A=layer.A, B=layer.B / 2, alpha=6.0)
    assert compare(one(layer), one(half))[0].relative < 1e-12


def test_the_largest_difference_comes_first(make_layer: MakeLayer) -> None:
    same, near = make_layer((8, 8), seed=1), make_layer((8, 8), seed=2)
    far = AdapterLayer(A=near.A, B=-near.B, alpha=near.alpha)
    close = AdapterLayer(A=near.A, B=near.B * 1.01, alpha=near.alpha)
    first = Adapter(components={"transformer": {"a": same, "b": near, "c": near}})
    second = Adapter(components={"transformer": {"a": same, "b": close, "c": far}})
    lines = compare(first, second)
    assert [line.path for line in lines] == ["c", "b", "a"]
    assert [line.relative for line in lines] == pytest.approx([2, 0.01, 0], abs=1e-6)


def test_layers_and_components_that_one_side_lacks(make_layer: MakeLayer) -> None:
    layer = make_layer((8, 8))
    first = Adapter(components={"transformer": {"a": layer}})
    second = Adapter(components={"transformer_2": {"a": layer}})
    lines = compare(first, second)
    assert [(line.component, line.missing) for line in lines] == [
        ("transformer", "second"),
        ("transformer_2", "first"),
    ]
    assert {line.relative for line in lines} == {1.0}


def test_zero_updates_and_shapes_that_differ(make_layer: MakeLayer) -> None:
    layer = make_layer((8, 8))
    blank = AdapterLayer(A=layer.A, B=torch.zeros_like(layer.B), alpha=4.0)
    assert compare(one(blank), one(blank))[0].relative == 0
    assert compare(one(blank), one(layer))[0].relative == math.inf
    assert compare(one(layer), one(blank))[0].relative == pytest.approx(1)
    assert compare(one(layer), one(make_layer((8, 9))))[0].relative == math.inf
    missing = Adapter(components={"transformer": {}})
    assert compare(one(blank), missing)[0].relative == 0  # nothing is what it did


def test_strengths_at_a_glance(make_layer: MakeLayer) -> None:
    layers = {
        "a": make_layer((8, 8), rank=2, alpha=4.0),
        "b": make_layer((8, 8), rank=4, alpha=4.0),
    }
    assert strengths(Adapter(components={"transformer": layers})) == {
        "modules": ["2"],
        "rank": ["2", "4"],
        "alpha": ["4"],
        "scale": ["1", "2"],
    }

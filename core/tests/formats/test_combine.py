"""Combining adapters: exact by concatenation, the best of its rank by SVD."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise

import pytest
import torch

from drl.errors import BadInput
from drl.formats.adapter import Adapter, AdapterLayer
from drl.formats.combine import combine, truncated, truncation_error

MakeLayer = Callable[..., AdapterLayer]


def one(layer: AdapterLayer, path: str = "x", component: str = "transformer") -> Adapter:
    return Adapter(components={component: {path: layer}})


def delta(layer: AdapterLayer) -> torch.Tensor:
    B, A = layer.factors()
    return B @ A


def test_concat_is_the_weighted_sum(make_layer: MakeLayer) -> None:
    first, second = (
        make_layer((9, 7), rank=2, seed=1),
        make_layer((9, 7), rank=3, alpha=1.0, seed=2),
    )
    total = combine([(one(first), 0.7), (one(second), -0.3)], method="concat", rank=None)
    layer = total.components["transformer"]["x"]
    assert (layer.rank, layer.scale, layer.A.dtype) == (5, 1, torch.float32)
    wanted = 0.7 * delta(first) - 0.3 * delta(second)
    torch.testing.assert_close(delta(layer), wanted, rtol=0, atol=1e-6)


def test_convolutions_keep_their_shapes(make_layer: MakeLayer) -> None:
    first, second = (make_layer((4, 3, 3, 3), seed=n) for n in (1, 2))
    layer = combine([(one(first), 1.0), (one(second), 1.0)], method="concat", rank=None).components[
        "transformer"
    ]["x"]
    assert (layer.A.shape, layer.B.shape) == ((4, 3, 3, 3), (4, 4, 1, 1))
    torch.testing.assert_close(delta(layer), delta(first) + delta(second), rtol=0, atol=1e-5)


@pytest.mark.parametrize("rank", [1, 2, 4])
def test_svd_is_the_best_approximation_of_its_rank(make_layer: MakeLayer, rank: int) -> None:
    parts = [make_layer((20, 15), rank=3, seed=n) for n in (1, 2)]
    total = delta(parts[0]) + delta(parts[1])
    U, S, V = torch.linalg.svd(total)
    wanted = U[:, :rank] * S[:rank] @ V[:rank]
    combined = combine([(one(p), 1.0) for p in parts], method="svd", rank=rank)
    layer = combined.components["transformer"]["x"]
    assert layer.rank == rank
    torch.testing.assert_close(delta(layer), wanted, rtol=0, atol=1e-5)


def test_a_rank_that_is_enough_loses_nothing(make_layer: MakeLayer) -> None:
    parts = [(one(make_layer((20, 15), rank=3, seed=n)), 1.0) for n in (1, 2)]
    exact = combine(parts, method="concat", rank=None)
    assert truncation_error(exact, combine(parts, method="svd", rank=6)) < 1e-6
    assert truncation_error(exact, combine(parts, method="svd", rank=50)) < 1e-6
    errors = [truncation_error(exact, combine(parts, method="svd", rank=r)) for r in range(1, 6)]
    assert all(worse > better for worse, better in pairwise(errors))
    assert errors[0] > 0.5


def test_truncated_factors_share_the_singular_values(make_layer: MakeLayer) -> None:
    B, A = make_layer((20, 15), rank=5).factors()
    left, right = truncated(B, A, 3)
    torch.testing.assert_close(left.norm(dim=0), right.norm(dim=1), rtol=1e-9, atol=0)


def test_a_layer_that_one_part_lacks_is_the_other(make_layer: MakeLayer) -> None:
    layer = make_layer((8, 8), rank=2)
    total = combine(
        [(one(layer, "a"), 0.5), (one(layer, "b"), 2.0), (one(layer, "a", "transformer_2"), 1.0)],
        method="concat",
        rank=None,
    )
    assert set(total.components) == {"transformer", "transformer_2"}
    torch.testing.assert_close(
        delta(total.components["transformer"]["a"]), 0.5 * delta(layer), rtol=0, atol=1e-6
    )
    torch.testing.assert_close(
        delta(total.components["transformer"]["b"]), 2 * delta(layer), rtol=0, atol=1e-6
    )


def test_other_shapes_and_other_tensors_are_refused(make_layer: MakeLayer) -> None:
    parts = [(one(make_layer((8, 8))), 1.0), (one(make_layer((8, 9))), 1.0)]
    with pytest.raises(BadInput, match=r"transformer.x has another shape .*different base models"):
        combine(parts, method="concat", rank=None)
    full = Adapter(
        components={"transformer": {"x": make_layer((8, 8))}},
        others={"transformer": {"y.bias": torch.ones(1)}},
    )
    with pytest.raises(BadInput, match="biases or modules_to_save"):
        combine([(full, 1.0)], method="concat", rank=None)


@pytest.mark.parametrize(("method", "rank"), [("concat", 4), ("svd", None)])
def test_a_rank_belongs_to_svd(make_layer: MakeLayer, method: str, rank: int | None) -> None:
    with pytest.raises(BadInput, match="--rank belongs to --method svd"):
        combine([(one(make_layer((8, 8))), 1.0)], method=method, rank=rank)

"""Recomputed blocks: equal gradients, less memory, an evenly spread share, clear refusals."""

from __future__ import annotations

import pytest
import torch
from tiny_transformer import (
    WRAP,
    adapted,
    gradients,
    largest_difference,
    predicted,
    saved_bytes,
    transformer,
)
from torch import nn

from drl.errors import BadInput
from drl.model.checkpointing import checkpoint_blocks, chosen
from drl.model.compiled import Compilations, compile_blocks

BF16 = torch.bfloat16


def recomputed(share: float = 1.0, dropout: float = 0.0, layers: int = 4) -> nn.Module:
    model = transformer(layers=layers)
    checkpoint_blocks("transformer", model, WRAP, share)
    return adapted(model, dropout=dropout)


@pytest.mark.parametrize("dtype", [None, BF16])
@pytest.mark.parametrize("share", [0.5, 1.0])
def test_gradients_are_equal_bit_for_bit_with_dropout_and_adapters(
    dtype: torch.dtype | None, share: float
) -> None:
    expected = gradients(adapted(transformer(), dropout=0.3), dtype)
    assert largest_difference(gradients(recomputed(share, 0.3), dtype), expected) == 0.0
    # dropout takes part: other draws give other gradients
    assert largest_difference(gradients(adapted(transformer()), dtype), expected) > 0


def test_full_training_has_equal_gradients_too() -> None:
    expected = gradients(transformer())
    model = transformer()
    assert checkpoint_blocks("transformer", model, WRAP) == 4
    assert largest_difference(gradients(model), expected) == 0.0


def test_a_share_keeps_less_than_all_and_more_than_none() -> None:
    kept = {}
    for share in (0.0, 0.5, 1.0):
        model = recomputed(share) if share else adapted(transformer())
        model.train()
        with saved_bytes() as total:
            prediction = predicted(model)
        prediction.sum().backward()
        kept[share] = total[0]
    assert kept[1.0] < 0.2 * kept[0.0], "what is kept of a block is its input"
    assert kept[1.0] < kept[0.5] < kept[0.0]
    middle = (kept[0.0] + kept[1.0]) / 2
    assert kept[0.5] == pytest.approx(middle, rel=0.25)


@pytest.mark.parametrize(
    ("count", "share", "places"),
    [
        (4, 1.0, [0, 1, 2, 3]),
        (4, 0.5, [0, 2]),
        (4, 0.25, [0]),
        (4, 0.01, [0]),
        (10, 0.3, [0, 3, 6]),
        (24, 1 / 3, [0, 3, 6, 9, 12, 15, 18, 21]),
        (5, 0.8, [0, 1, 2, 3]),
        (3, 0.999, [0, 1, 2]),
    ],
)
def test_a_share_is_spread_evenly(count: int, share: float, places: list[int]) -> None:
    assert [place for place in range(count) if chosen(place, share)] == places


def test_a_forward_without_gradient_recomputes_nothing() -> None:
    model = recomputed()
    calls = []
    for block in model.transformer_blocks:
        block.register_forward_pre_hook(lambda *_: calls.append(1))
    with torch.no_grad():
        predicted(model)
    assert len(calls) == 4
    gradients(model)
    assert len(calls) == 4 + 2 * 4


@pytest.mark.parametrize(
    ("layers", "share"), [(1, 1.0), pytest.param(4, 0.5, marks=pytest.mark.slow)]
)
def test_a_compiled_block_recomputes_inside_its_graph(layers: int, share: float) -> None:
    """Rows enough that activations, not weights, are what is kept."""
    kept, found = {}, {}
    for recomputes in (False, True):
        model = transformer(layers=layers)
        if recomputes:
            checkpoint_blocks("transformer", model, WRAP, share, compiled=True)
            assert not model.is_gradient_checkpointing, "never twice"
        adapted(model, dropout=0.3)
        log = Compilations("trainer", "aot_eager")
        assert compile_blocks(model, WRAP, log) == layers
        found[recomputes] = gradients(model, rows=32)
        graphs = log.graphs
        with saved_bytes() as total:
            predicted(model, rows=32)
        kept[recomputes] = total[0]
        assert (log.graphs, log.unexpected) == (graphs, 0)
    assert largest_difference(found[True], found[False]) < 1e-6, (
        "the same dropout as in the forward"
    )
    assert kept[True] < (0.3 if share == 1 else 0.8) * kept[False]
    torch._dynamo.reset()


def test_alike_blocks_that_recompute_share_a_class_and_their_names() -> None:
    model = transformer()
    assert checkpoint_blocks("transformer", model, WRAP, 0.5, compiled=True) == 2
    kinds = [type(block) for block in model.transformer_blocks]
    assert kinds[0] is kinds[2]
    assert kinds[1] is kinds[3]
    assert kinds[0] is not kinds[1]
    assert {kind.__name__ for kind in kinds} == set(WRAP)
    assert issubclass(kinds[0], kinds[1])
    # without a compiler it is the same function
    assert largest_difference(gradients(model), gradients(transformer())) == 0.0


def test_what_cannot_recompute_is_refused_with_its_class() -> None:
    with pytest.raises(
        BadInput, match=r"gradient_checkpointing: unet \(Linear\) is no diffusers model"
    ):
        checkpoint_blocks("unet", nn.Linear(1, 1), WRAP)
    with pytest.raises(BadInput, match=r"no module of class Block"):
        checkpoint_blocks("transformer", transformer(), ("Block",))

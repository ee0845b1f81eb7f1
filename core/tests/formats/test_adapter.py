"""``Adapter``: strengths folded into alpha, configs made from layers, everything unusable refused."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch

from drl.errors import BadInput
from drl.formats.adapter import (
    Adapter,
    AdapterLayer,
    check_adapter,
    check_fits,
    config_of,
    converted,
    embedding_layers,
    layers_of_state,
    merged_weight,
    misfits,
    only,
    plain_alpha,
    state_of_layers,
)
from drl.formats.layout import ComponentLayout
from drl.lora import LoraConfig
from drl.lora.matching import matches

MakeLayer = Callable[..., AdapterLayer]
MakeAdapter = Callable[..., Adapter]


def config(**fields: Any) -> LoraConfig:
    return LoraConfig(**{"rank": 4, "alpha": 8, "target_modules": ("x",), **fields})


@pytest.mark.parametrize(
    ("fields", "alpha"),
    [
        ({}, 8),
        ({"use_rslora": True}, 16),  # 8 / sqrt(4) = 4 = 16 / 4
        ({"alpha_pattern": {"x": 3}}, 3),
        ({"use_rslora": True, "rank_pattern": {"x": 9}, "alpha_pattern": {"x": 2}}, 6),
    ],
)
def test_alpha_carries_patterns_and_rslora(fields: dict[str, Any], alpha: float) -> None:
    assert plain_alpha(config(**fields), "a.x") == pytest.approx(alpha)


def test_a_state_splits_into_layers_and_the_rest() -> None:
    state = {
        "x.lora_A.weight": torch.ones(4, 5),
        "x.lora_B.weight": torch.ones(6, 4),
        "head.weight": torch.ones(2),
    }
    layers, rest = layers_of_state(state, config())
    assert list(layers) == ["x"]
    assert (layers["x"].scale, layers["x"].shape) == (2, (6, 5))
    assert list(rest) == ["head.weight"]
    assert set(state_of_layers(layers)) == {"x.lora_A.weight", "x.lora_B.weight"}


def test_a_made_config_gives_every_layer_its_rank_and_scale(make_layer: MakeLayer) -> None:
    layers = {
        "blocks.0.to_q": make_layer((8, 8), rank=2, alpha=4.0),
        "blocks.1.to_q": make_layer((8, 8), rank=2, alpha=4.0),
        "blocks.10.to_q": make_layer((8, 8), rank=3, alpha=1.0),
        "to_q": make_layer((8, 8), rank=1, alpha=2.5),
    }
    made = config_of(Adapter(components={"transformer": layers}), "transformer")
    for path, layer in layers.items():
        assert made.rank_of(path) == layer.rank
        assert math.isclose(made.scale_of(path), layer.scale)
        assert matches(made.target_modules, path)
    # a pattern key of one module must not hit another that ends alike
    assert made.rank_of("refiner.to_q") == 2
    assert made.rank_of("blocks.0.blocks.10.to_q") == 2


def test_targets_are_a_regular_expression_when_names_end_alike(make_layer: MakeLayer) -> None:
    adapter = Adapter(components={"transformer": {"proj_out": make_layer((4, 4))}})
    base = ComponentLayout(
        class_name="Toy", weights={"proj_out": (4, 4), "refiner.proj_out": (4, 4)}
    )
    assert config_of(adapter, "transformer").target_modules == ("proj_out",)
    targets = config_of(adapter, "transformer", base).target_modules
    assert isinstance(targets, str)
    assert re.fullmatch(targets, "proj_out")
    assert not re.fullmatch(targets, "refiner.proj_out")


def test_a_config_that_came_with_the_adapter_is_kept(make_layer: MakeLayer) -> None:
    kept = config(rank=2, alpha=4, target_modules=("to_q",), dropout=0.1)
    adapter = Adapter(
        components={"transformer": {"a.to_q": make_layer((4, 4))}}, configs={"transformer": kept}
    )
    assert config_of(adapter, "transformer") is kept


@pytest.mark.parametrize(
    ("A", "B", "words"),
    [
        (torch.ones(2, 4), torch.ones(6, 3), "do not fit"),
        (torch.ones(2, 4), torch.ones(6), "do not fit"),
        (torch.ones(2, 4, 1, 1), torch.ones(6, 2), "do not fit"),
        (torch.ones(2, 4, 3, 3), torch.ones(6, 2, 3, 3), "do not fit"),
        (torch.ones(0, 4), torch.ones(6, 0), "rank 0"),
        (torch.full((2, 4), float("nan")), torch.ones(6, 2), "non-finite"),
        (torch.ones(2, 4), torch.full((6, 2), float("inf")), "non-finite"),
        (torch.ones(2, 4, dtype=torch.int8), torch.ones(6, 2), "int8"),
    ],
)
def test_unusable_matrices_are_named(A: torch.Tensor, B: torch.Tensor, words: str) -> None:
    adapter = Adapter(components={"transformer": {"a.to_q": AdapterLayer(A=A, B=B, alpha=1)}})
    with pytest.raises(BadInput, match=words) as caught:
        check_adapter(adapter, "some.safetensors")
    assert "a.to_q" in str(caught.value)
    assert "some.safetensors" in str(caught.value)


def test_an_adapter_of_nothing_is_refused() -> None:
    with pytest.raises(BadInput, match="holds no adapter"):
        check_adapter(Adapter(components={"transformer": {}}), "x")


def test_what_does_not_fit_the_base_is_listed_whole(
    toy_layout: dict[str, ComponentLayout], make_layer: MakeLayer
) -> None:
    adapter = Adapter(
        components={
            "transformer": {
                "mid.to_q": make_layer((6, 4)),
                "head": make_layer((9, 4)),
                "gone": make_layer((4, 4)),
            },
            "unet": {},
        }
    )
    lines = misfits(adapter, toy_layout)
    assert len(lines) == 3
    with pytest.raises(
        BadInput, match=r"(?s)belongs to another base.*gone.*\[9, 4\], the base has \[5, 4\]"
    ):
        check_fits(adapter, toy_layout, "x")


def test_a_convolution_is_one_weight(make_layer: MakeLayer) -> None:
    layer = make_layer((4, 3, 2, 2), rank=2, alpha=1.0)
    assert layer.shape == (4, 3, 2, 2)
    W = torch.zeros(4, 3, 2, 2)
    by_hand = torch.zeros(4, 3, 2, 2)
    for out in range(4):
        for r in range(2):
            by_hand[out] += 0.5 * layer.B[out, r, 0, 0] * layer.A[r]
    torch.testing.assert_close(merged_weight(W, layer, torch.float32), by_hand)


def test_merging_rounds_once() -> None:
    # 1 + 2^-9 * 3 in bfloat16 (8 bits): rounding the delta first changes the sum
    W = torch.ones(1, 1, dtype=torch.bfloat16)
    layer = AdapterLayer(A=torch.full((1, 1), 2.0**-9), B=torch.full((1, 1), 3.0), alpha=1.0)
    assert merged_weight(W, layer, torch.float32).item() == 1 + 3 * 2.0**-9
    assert merged_weight(W, layer, torch.bfloat16).item() == 1 + 2.0**-7


def test_an_embedding_is_updated_by_the_transpose() -> None:
    A, B = torch.randn(2, 7), torch.randn(4, 2)
    adapter = Adapter(
        components={"transformer": {}},
        configs={"transformer": config(rank=2, alpha=3)},
        others={
            "transformer": {
                "emb.lora_embedding_A": A,
                "emb.lora_embedding_B": B,
                "head.weight": torch.ones(1),
            }
        },
    )
    layers, rest = embedding_layers(adapter, "transformer")
    assert list(rest) == ["head.weight"]
    merged = merged_weight(torch.zeros(7, 4), layers["emb"], torch.float32)
    torch.testing.assert_close(merged, 1.5 * (B @ A).T)


def test_one_component_of_several(make_layer: MakeLayer) -> None:
    adapter = Adapter(
        components={"transformer": {"x": make_layer((4, 4))}, "transformer_2": {}},
        others={"transformer_2": {"y": torch.ones(1)}},
    )
    chosen = only(adapter, "transformer")
    assert (chosen.single, dict(chosen.others)) == ("transformer", {})
    assert only(adapter, None) is adapter
    with pytest.raises(
        BadInput, match="--component vae: the adapter has transformer, transformer_2"
    ):
        only(adapter, "vae")


def test_conversion_reaches_every_tensor(make_adapter: MakeAdapter) -> None:
    adapter = make_adapter({"x": (4, 4)})
    assert converted(adapter, None) is adapter
    half = converted(adapter, torch.float16).components["transformer"]["x"]
    assert (half.A.dtype, half.B.dtype, half.alpha) == (torch.float16, torch.float16, 4.0)

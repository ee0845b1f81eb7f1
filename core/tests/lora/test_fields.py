"""Settings by name in both spellings, and the layer rules of PEFT."""

from __future__ import annotations

from typing import Any

import pytest
from torch import nn

from drl.lora import LoraConfig, LoraError
from drl.lora.matching import layer_number, match_targets


def test_both_spellings_mean_the_same() -> None:
    ours = {
        "rank": 4,
        "alpha": 6.5,
        "target_modules": ["to_q"],
        "dropout": 0.1,
        "init": "gaussian",
        "bias": "all",
    }
    theirs = {
        "r": 4,
        "lora_alpha": 6.5,
        "lora_modules": ["to_q"],
        "lora_dropout": 0.1,
        "init_lora_weights": "gaussian",
        "bias": "all",
    }
    assert LoraConfig.from_fields(ours) == LoraConfig.from_fields(theirs)
    assert LoraConfig.from_fields({**ours, **theirs}) == LoraConfig.from_fields(ours)


def test_what_is_absent_or_null_takes_pefts_default() -> None:
    read = LoraConfig.from_fields({"target_modules": ["q"], "r": None, "rank_pattern": None})
    assert read == LoraConfig(rank=8, alpha=8, target_modules=("q",), init="kaiming-uniform")


@pytest.mark.parametrize(
    ("given", "init"),
    [
        (True, "kaiming-uniform"),
        (False, "random"),
        ("Gaussian", "gaussian"),
        ("pissa", "pissa"),
    ],
)
def test_starts_in_pefts_words(given: object, init: str) -> None:
    fields = {"target_modules": ["q"], "init_lora_weights": given}
    assert LoraConfig.from_fields(fields).init == init


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"rank": 4, "r": 8}, ("rank = 4", "r = 8")),
        ({"alpha": 4, "lora_alpha": 8}, ("alpha = 4", "lora_alpha = 8")),
        (
            {"lora_modules": ["a"], "target_modules": ["b"]},
            ("target_modules = ['b']", "lora_modules = ['a']"),
        ),
        ({"dropout": 0, "lora_dropout": 0.5}, ("dropout = 0", "lora_dropout = 0.5")),
        ({"init": "gaussian", "init_lora_weights": True}, ("init = 'gaussian'", "True")),
    ],
)
def test_two_spellings_with_two_values_are_an_error_that_names_both(
    fields: dict[str, Any], words: tuple[str, str]
) -> None:
    with pytest.raises(LoraError, match="two spellings") as caught:
        LoraConfig.from_fields({"target_modules": ["b"], **fields})
    for word in words:
        assert word in str(caught.value)


def test_lists_and_tuples_are_no_difference() -> None:
    fields = {"lora_modules": ["a", "b"], "target_modules": ("a", "b")}
    assert LoraConfig.from_fields(fields).target_modules == ("a", "b")


def test_unknown_settings_are_an_error_with_near_names() -> None:
    with pytest.raises(LoraError, match="rnak; near names: rank"):
        LoraConfig.from_fields({"target_modules": ["q"], "rnak": 3})
    with pytest.raises(LoraError, match="xyz; known: rank, r, alpha"):
        LoraConfig.from_fields({"target_modules": ["q"], "xyz": 3})


@pytest.mark.parametrize(
    ("pattern", "path", "number"),
    [
        ((), "model.layers.3.attn.q", 3),
        ((), "layers.3.attn.q", None),  # a list at the root counts only by name
        ((), "model.layers.1.experts.0.up", 1),
        ((), "model.layers.3", None),
        (("layers",), "layers.3.attn.q", 3),
        (("layers",), "model.layers.3.attn.q", 3),
        (("blocks",), "model.layers.3.attn.q", None),
        (("blocks", "layers"), "model.layers.3.attn.q", 3),
        (("layers",), "my_layers.3.q", None),
        (("experts",), "model.layers.1.experts.0.up", 0),
    ],
)
def test_number_of_a_layer(pattern: tuple[str, ...], path: str, number: int | None) -> None:
    assert layer_number(pattern, path) == number


@pytest.mark.parametrize(
    ("changes", "word"),
    [
        ({"target_modules": "to_q", "layers_to_transform": 1}, "needs a list"),
        ({"target_modules": "all-linear", "layers_to_transform": [1]}, "needs a list"),
        ({"layers_pattern": "blocks"}, "give both"),
        ({"layers_to_transform": -1}, "layers_to_transform is -1"),
        ({"layers_to_transform": [1, "2"]}, "layers_to_transform"),
        ({"layers_to_transform": True}, "layers_to_transform is True"),
        ({"layers_to_transform": 1, "layers_pattern": ["("]}, "layers_pattern"),
    ],
)
def test_layer_settings_that_cannot_be_meant(changes: dict[str, Any], word: str) -> None:
    fields = {"rank": 2, "alpha": 2, "target_modules": ("to_q",), **changes}
    with pytest.raises(LoraError, match=word):
        LoraConfig(**fields)


def test_an_empty_list_of_layers_means_all(toy: nn.Module) -> None:
    config = LoraConfig(rank=2, alpha=2, target_modules=("to_q",), layers_to_transform=())
    assert config.layers_to_transform is None
    assert len(match_targets(toy, config).layers) == 3


def test_layers_choose_blocks_of_the_model(toy: nn.Module) -> None:
    config = LoraConfig(
        rank=2, alpha=2, target_modules=("to_q",), layers_to_transform=2, layers_pattern="blocks"
    )
    assert list(match_targets(toy, config).layers) == ["blocks.2.attn.to_q"]


@pytest.mark.parametrize(
    ("changes", "word"),
    [
        ({"layers_to_transform": [1, 7], "layers_pattern": "blocks"}, r'"7" \(layers_to_transform'),
        ({"layers_to_transform": 1, "layers_pattern": ["blocks", "lyers"]}, '"lyers"'),
        ({"layers_to_transform": 1}, "layers_to_transform = \\[1\\].*layers_pattern"),
        ({"layers_to_transform": 9, "layers_pattern": "blocks"}, "layers_to_transform = \\[9\\]"),
    ],
)
def test_a_layer_or_list_that_does_not_exist_is_an_error(
    toy: nn.Module, changes: dict[str, Any], word: str
) -> None:
    import torch

    from drl.lora import inject

    config = LoraConfig(rank=2, alpha=2, target_modules=("to_q",), **changes)
    with pytest.raises(LoraError, match=word):
        inject(toy, config, generator=torch.Generator())

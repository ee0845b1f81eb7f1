"""Rules of [lora]: two spellings, layers, what is unused, and an adapter that a run starts from."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

Problems = Callable[..., dict[str, str]]
Load = Callable[..., Any]


def test_pefts_spellings_are_taken(load: Load) -> None:
    recipe = load({"lora.rank": None, "lora.r": 8, "lora.lora_alpha": 4, "lora.lora_modules": "q"})
    assert (recipe.lora.rank, recipe.lora.alpha) == (8, 4.0)
    assert recipe.lora.target_modules == ("q",)
    assert recipe.origins["lora.rank"] == "auto"


@pytest.mark.parametrize(
    ("changes", "path", "words"),
    [
        ({"lora.r": 8}, "lora.r", ("lora.rank, which is 32, got 8",)),
        (
            {"lora.alpha": 2.0, "lora.lora_alpha": 3.0},
            "lora.lora_alpha",
            ("lora.alpha, which is 2", "got 3"),
        ),
        (
            {"lora.target_modules": ["a"], "lora.lora_modules": ["b"]},
            "lora.lora_modules",
            ("lora.target_modules", "give one of them"),
        ),
    ],
)
def test_two_spellings_with_two_values_name_both(
    problems: Problems, changes: dict[str, Any], path: str, words: tuple[str, ...]
) -> None:
    found = problems(changes)
    assert list(found) == [path]
    for word in words:
        assert word in found[path]


def test_two_spellings_with_one_value_are_fine(load: Load) -> None:
    assert load({"lora.rank": 32, "lora.r": 32}).lora.rank == 32


@pytest.mark.parametrize(
    ("given", "stored"),
    [
        ("to_q, to_v", ("to_q", "to_v")),
        ("to_q", ("to_q",)),
        (["attn.to_q"], ("attn.to_q",)),
        ("all-linear", "all-linear"),
        ("All-Linear", "All-Linear"),
        (r".*blocks\.\d+\.attn\.to_[qkv]", r".*blocks\.\d+\.attn\.to_[qkv]"),
        ("(to_q|to_v)", "(to_q|to_v)"),
    ],
)
def test_modules_are_names_or_one_regular_expression(load: Load, given: Any, stored: Any) -> None:
    assert load({"lora.target_modules": given}).lora.target_modules == stored
    assert load({"lora.exclude_modules": given}).lora.exclude_modules == stored


def test_tables_and_lists_of_a_recipe(load: Load) -> None:
    recipe = load(
        {
            "lora.rank_pattern": [["blocks.1.attn.to_q", 4], ["to_q", 2]],
            "lora.alpha_pattern": {"to_v": 2.5},
            "lora.layers_to_transform": [0, 2],
            "lora.layers_pattern": "transformer_blocks",
            "lora.use_rslora": True,
            "lora.bias": "lora_only",
            "lora.modules_to_save": "norm_out, proj_out",
            "lora.dropout": 0.25,
            "lora.init_weights": True,
        }
    ).lora
    assert recipe.rank_pattern == (("blocks.1.attn.to_q", 4), ("to_q", 2))
    assert recipe.alpha_pattern == (("to_v", 2.5),)
    assert recipe.layers_to_transform == (0, 2)
    assert recipe.layers_pattern == ("transformer_blocks",)
    assert recipe.modules_to_save == ("norm_out", "proj_out")
    assert recipe.init_weights == "kaiming-uniform"


@pytest.mark.parametrize(
    ("changes", "path", "word"),
    [
        ({"lora.dropout": 1.0}, "lora.dropout", "must be below 1"),
        ({"lora.bias": "some"}, "lora.bias", "one of none, all, lora_only"),
        ({"lora.init_weights": "pissa_niter_4"}, "lora.init_weights", "orthogonal, pissa, olora"),
        ({"lora.target_modules": []}, "lora.target_modules", ""),
        ({"lora.layers_to_transform": []}, "lora.layers_to_transform", ""),
        (
            {"lora.layers_to_transform": [1], "lora.target_modules": "all-linear"},
            "lora.layers_to_transform",
            "regular expression",
        ),
        ({"lora.layers_pattern": "blocks"}, "lora.layers_pattern", "no use without"),
        ({"lora.rank": 3, "lora.init_weights": "orthogonal"}, "lora.init_weights", "even ranks"),
        ({"lora.is_trainable": False}, "lora.is_trainable", "no trainable adapters"),
        ({"lora.adapter_path": "gone"}, "lora.adapter_path", "adapter_config.json"),
    ],
)
def test_what_cannot_be_meant(
    problems: Problems, changes: dict[str, Any], path: str, word: str
) -> None:
    found = problems(changes)
    assert list(found) == [path]
    assert word in found[path]


def test_dropout_warns_where_log_probs_are_compared(
    warnings: Callable[..., dict[str, str]],
) -> None:
    assert "ratios start" in warnings({"lora.dropout": 0.1})["lora.dropout"]
    supervised = {"algorithm.loss": "sft_loss", "train.train_only": True, "reward.type": None}
    assert "lora.dropout" not in warnings({**supervised, "lora.dropout": 0.1})


def test_options_without_adapters_warn_and_a_start_adapter_is_refused(
    load: Load, problems: Problems
) -> None:
    recipe = load({"lora.enabled": False, "lora.bias": "all", "lora.rank_pattern": {"q": 2}})
    paths = {problem.path for problem in recipe.warnings}
    assert {"lora.rank", "lora.bias", "lora.rank_pattern"} <= paths
    found = problems({"lora.enabled": False, "lora.adapter_path": "adapter"})
    assert "lora.enabled = true" in found["lora.adapter_path"]


def stored(folder: Path, **fields: Any) -> None:
    config = {"peft_type": "LORA", "r": 4, "lora_alpha": 6, "target_modules": ["to_q", "to_v"]}
    (folder / "adapter" / "adapter_config.json").write_text(json.dumps({**config, **fields}))


def test_the_adapter_decides_what_the_recipe_does_not_say(load: Load, folder: Path) -> None:
    stored(folder, use_rslora=True, bias="all", modules_to_save=["proj_out"], lora_dropout=0.5)
    recipe = load({"lora.rank": None, "lora.adapter_path": "adapter"})
    lora = recipe.lora
    assert (lora.rank, lora.alpha, lora.target_modules) == (4, 6.0, ("to_q", "to_v"))
    assert (lora.use_rslora, lora.bias, lora.dropout) == (True, "all", 0.5)
    assert lora.modules_to_save == ("proj_out",)
    assert lora.adapter_path == folder / "adapter"
    assert {recipe.origins[f"lora.{key}"] for key in ("rank", "alpha", "bias")} == {"auto"}


def test_the_resolved_recipe_of_such_a_run_is_a_recipe_again(load: Load, folder: Path) -> None:
    stored(folder, use_rslora=True, rank_pattern={"to_q": 2}, exclude_modules=None)
    first = load({"lora.rank": None, "lora.adapter_path": "adapter"})
    again = load(text=first.to_toml())
    assert again.lora == first.lora


@pytest.mark.parametrize(
    ("changes", "path", "word"),
    [
        ({"lora.rank": 8}, "lora.rank", "is 8, but the adapter in"),
        ({"lora.r": 8}, "lora.r", "has 4"),
        ({"lora.alpha": 5.0}, "lora.alpha", "has 6"),
        (
            {"lora.target_modules": ["to_k"]},
            "lora.target_modules",
            "the adapter's own value counts",
        ),
        ({"lora.rank_pattern": {"to_q": 2}}, "lora.rank_pattern", "has nothing"),
        ({"lora.bias": "all"}, "lora.bias", "has 'none'"),
    ],
)
def test_a_recipe_that_contradicts_the_adapter_is_refused(
    problems: Problems, folder: Path, changes: dict[str, Any], path: str, word: str
) -> None:
    stored(folder, bias="none")
    found = problems({"lora.rank": None, "lora.adapter_path": "adapter", **changes})
    assert list(found) == [path]
    assert word in found[path]


def test_a_recipe_may_repeat_what_the_adapter_says(load: Load, folder: Path) -> None:
    stored(folder)
    changes = {"lora.rank": 4, "lora.alpha": 6.0, "lora.target_modules": ["to_v", "to_q"]}
    assert load({**changes, "lora.adapter_path": "adapter"}).lora.rank == 4


def test_wrong_values_in_the_adapter_are_left_to_its_reader(load: Load, folder: Path) -> None:
    stored(folder, r="four", lora_alpha=-1, target_modules=3)
    lora = load({"lora.rank": None, "lora.adapter_path": "adapter"}).lora
    assert (lora.rank, lora.alpha, lora.target_modules) == (64, 64.0, None)


def test_several_components_have_a_folder_each(
    load: Load, problems: Problems, folder: Path
) -> None:
    both = {
        "model.components": ["transformer", "transformer_2"],
        "lora.rank": None,
        "lora.adapter_path": "adapter",
    }
    found = problems(both)
    assert str(folder / "adapter" / "transformer") in found["lora.adapter_path"]

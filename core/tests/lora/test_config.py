"""Validation and per-module values of `LoraConfig`."""

from __future__ import annotations

import ast
import math
import pickle
import sys
from pathlib import Path
from typing import Any

import pytest

import drl.lora
from drl.lora import LoraConfig, LoraError


def config(**changes: Any) -> LoraConfig:
    return LoraConfig(**{"rank": 4, "alpha": 8, "target_modules": ("to_q",), **changes})


@pytest.mark.parametrize(
    ("changes", "word"),
    [
        ({"rank": 0}, "rank"),
        ({"rank": -4}, "rank"),
        ({"rank": True}, "rank"),
        ({"rank": "4"}, "rank"),
        ({"rank": 4.0}, "rank"),
        ({"rank": 10**400}, "rank"),
        ({"alpha": None}, "alpha"),
        ({"alpha": math.nan}, "alpha"),
        ({"alpha": math.inf}, "alpha"),
        ({"alpha": -1}, "alpha"),
        ({"alpha": 10**400}, "alpha"),
        ({"target_modules": ()}, "target_modules is empty"),
        ({"target_modules": ""}, "target_modules is empty"),
        ({"target_modules": ("to_q", 3)}, "target_modules"),
        ({"target_modules": {"to_q": 1}}, "target_modules"),
        ({"target_modules": "to_(q"}, "regular expression"),
        ({"exclude_modules": "["}, "exclude_modules"),
        ({"init": "loftq"}, "gaussian, kaiming-uniform"),
        ({"init": ["gaussian"]}, "init"),
        ({"dropout": 1.0}, "dropout"),
        ({"dropout": "0.1"}, "dropout"),
        ({"rank_pattern": {"to_q": 0}}, 'rank_pattern\\["to_q"\\]'),
        ({"rank_pattern": {"(": 2}}, "rank_pattern key"),
        ({"rank_pattern": [("to_q", 2)]}, "rank_pattern"),
        ({"alpha_pattern": {"to_q": "2"}}, 'alpha_pattern\\["to_q"\\]'),
        ({"alpha_pattern": {3: 2}}, "alpha_pattern"),
        ({"use_rslora": 1}, "use_rslora"),
    ],
)
def test_value_out_of_range_is_refused_by_name(changes: dict[str, Any], word: str) -> None:
    with pytest.raises(LoraError, match=word):
        config(**changes)


def test_alpha_zero_warns_that_the_adapter_does_nothing() -> None:
    with pytest.warns(UserWarning, match="alpha is 0"):
        config(alpha=0)


def test_scale_is_alpha_over_rank_and_may_be_fractional() -> None:
    assert config(rank=8, alpha=5.0).scale_of("to_q") == 0.625


def test_rslora_uses_the_modules_own_rank() -> None:
    rs = config(use_rslora=True, rank_pattern={"to_v": 9})
    assert rs.scale_of("blocks.0.to_q") == 4.0
    assert rs.scale_of("blocks.0.to_v") == 8 / 3


@pytest.mark.parametrize(
    ("key", "fqn", "hit"),
    [
        ("q_proj", "layers.1.q_proj", True),
        ("q_proj", "layers.1.my_q_proj", False),
        ("layers.1.q_proj", "layers.11.q_proj", False),
        ("layers.1.q_proj", "model.layers.1.q_proj", True),
        ("layers.1.*q_proj", "layers.11.q_proj", True),
        ("^proj_out", "proj_out", True),
        ("^proj_out", "refiner.proj_out", False),
        ("to_q|to_v", "a.to_v", True),
        ("to_q|to_v", "a.to_qx", False),
        ("layers.1", "layers.1.q_proj", False),
    ],
)
def test_pattern_key_is_a_regex_from_a_component_boundary_to_the_end(
    key: str, fqn: str, hit: bool
) -> None:
    assert config(rank_pattern={key: 2}).rank_of(fqn) == (2 if hit else 4)


def test_first_matching_pattern_key_wins_and_alpha_stays_global() -> None:
    both = config(rank_pattern={"to_q": 6, "blocks.1.to_q": 2})
    assert both.rank_of("blocks.1.to_q") == 6
    assert both.alpha_of("blocks.1.to_q") == 8


def test_config_is_frozen_hashable_and_picklable() -> None:
    one = config(rank_pattern={"to_q": 2})
    assert pickle.loads(pickle.dumps(one)) == one
    assert hash(one) == hash(config(rank_pattern={"to_q": 2}))
    with pytest.raises(AttributeError):
        one.rank = 8  # type: ignore[misc]


def test_a_list_of_targets_becomes_a_tuple() -> None:
    assert config(target_modules=["to_q", "to_v"]).target_modules == ("to_q", "to_v")


def test_errors_survive_pickling() -> None:
    with pytest.raises(LoraError) as caught:
        config(rank=0)
    copy = pickle.loads(pickle.dumps(caught.value))
    assert str(copy) == str(caught.value)
    assert isinstance(copy, ValueError)


def test_the_package_needs_only_torch_safetensors_and_drl_errors() -> None:
    package = Path(drl.lora.__file__).parent
    for path in package.glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom):
                names = [node.module or ""]
            else:
                names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            for name in names:
                root = name.partition(".")[0]
                allowed = {"torch", "safetensors"} | set(sys.stdlib_module_names)
                ours = name == "drl.errors" or name.startswith("drl.lora")
                assert root in allowed or ours, (path.name, name)

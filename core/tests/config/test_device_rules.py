"""Options of the trainer's forward before anything is loaded."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

Load = Callable[..., Any]
Texts = Callable[..., dict[str, str]]


def warned(recipe: Any) -> dict[str, str]:
    return {problem.path: problem.message for problem in recipe.warnings}


def test_a_share_of_nothing_is_told(load: Load) -> None:
    recipe = load({"model.checkpointed_share": 0.5})
    assert "gradient_checkpointing is false" in warned(recipe)["model.checkpointed_share"]
    both = load({"model.checkpointed_share": 0.5, "model.gradient_checkpointing": True})
    assert both.model.checkpointed_share == 0.5
    assert "model.checkpointed_share" not in warned(both)
    assert "model.checkpointed_share" not in warned(load({}))


@pytest.mark.parametrize("key", ["model.gradient_checkpointing", "train.compile"])
def test_a_run_that_trains_nothing_ignores_them_aloud(load: Load, key: str) -> None:
    held_out = [{"name": "held_out", "path": "prompts.jsonl"}]
    only = {"train.num_rollout": 0, "eval.datasets": held_out}
    for idle in ({"debug.rollout_only": True}, only):
        assert "trains nothing" in warned(load({**idle, key: True}))[key]
        assert key not in warned(load({**idle, key: False}))
    assert key not in warned(load({key: True}))


@pytest.mark.parametrize("share", [0.0, -0.5, 1.5])
def test_a_share_lies_above_0_and_up_to_1(problems: Texts, share: float) -> None:
    found = problems({"model.checkpointed_share": share, "model.gradient_checkpointing": True})
    assert "model.checkpointed_share" in found


def test_dtypes_of_modules_keep_their_order_and_may_be_a_table(load: Load) -> None:
    pairs = [["*.norm*", "fp32"], ["*.norm1.*", "bf16"], ["proj", "fp16"]]
    assert load({"train.parameter_dtypes": pairs}).train.parameter_dtypes == tuple(
        map(tuple, pairs)
    )
    assert load({}).train.parameter_dtypes == ()


@pytest.mark.parametrize("pairs", [[["*.norm*", "fp8"]], [["*.norm*"]], ["*.norm*"]])
def test_other_dtypes_and_shapes_are_refused(problems: Texts, pairs: Any) -> None:
    assert any(
        path.startswith("train.parameter_dtypes")
        for path in problems({"train.parameter_dtypes": pairs})
    )

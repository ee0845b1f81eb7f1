"""What the engine tells ``drl plan`` before it starts."""

from __future__ import annotations

from typing import Any

import pytest

from drl.api import Context, EngineOutline
from drl_engine_local.config import LocalOptions
from drl_engine_local.engine import LocalEngine


def outlined(**options: Any) -> EngineOutline:
    return LocalEngine(LocalOptions.model_validate(options), Context()).outline()


def test_the_outline_of_an_engine_as_it_comes() -> None:
    assert outlined() == EngineOutline(
        rows=8,
        weights="auto",
        adapters="merged",
        weights_option="rollout.local.weights",
        rows_option="rollout.local.rows",
    )


@pytest.mark.parametrize(
    ("option", "value", "field"),
    [
        ("rows", 16, "rows"),
        ("weights", "forward", "weights"),
        ("adapters", "applied", "adapters"),
        ("compile", True, "compiled"),
        ("cuda_graphs", True, "recorded"),
    ],
)
def test_every_option_that_costs_memory_or_time_is_told(
    option: str, value: object, field: str
) -> None:
    assert vars_of(outlined(**{option: value}))[field] == value
    assert vars_of(outlined())[field] != value


def vars_of(outline: EngineOutline) -> dict[str, object]:
    return {
        "rows": outline.rows,
        "weights": outline.weights,
        "adapters": outline.adapters,
        "compiled": outline.compiled,
        "recorded": outline.graphs_option == "rollout.local.cuda_graphs",
    }

"""A recipe that asks for what its engine cannot do is refused before anything is loaded."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from e2e import run_here, write_recipe

from drl.errors import BadInput
from drl.interfaces.engine import EngineCapabilities
from drl_engine_local.engine import LocalEngine

ABLE = EngineCapabilities(sde_types=frozenset({"cps", "ode"}), debug_tensors=True, sleeps=True)


@pytest.mark.parametrize(
    ("lacks", "sets", "said"),
    [
        (
            {},
            ["sde.type=sde"],
            "sde.type: engine 'local' cannot sample with 'sde'; it has cps, ode",
        ),
        (
            {"debug_tensors": False},
            ["debug.engine_debug=true"],
            "debug.engine_debug: engine 'local'",
        ),
        ({"sleeps": False}, ["cluster.offload=true"], "cluster.offload_rollout: engine 'local'"),
    ],
)
def test_what_the_engine_cannot_do_is_refused(
    checkpoint: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    lacks: dict[str, Any],
    sets: list[str],
    said: str,
) -> None:
    monkeypatch.setattr(LocalEngine, "capabilities", lambda self: replace(ABLE, **lacks))
    recipe = write_recipe(tmp_path, checkpoint)
    with pytest.raises(BadInput) as refusal:
        run_here(recipe, tmp_path / "run", *sets)
    assert said in str(refusal.value)


@pytest.mark.parametrize("option", ["cluster.device", "sampling.generator_device"])
def test_a_gpu_that_is_not_there_is_refused(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, option: str
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    recipe = write_recipe(tmp_path, checkpoint)
    with pytest.raises(BadInput, match=rf"^{option} is 'cuda', but torch .* sees no GPU here"):
        run_here(recipe, tmp_path / "run", f"{option}=cuda")

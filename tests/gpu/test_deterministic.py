"""``train.deterministic`` on the device: two runs are equal to the bit, eager and compiled."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
from e2e import metric_rows, run_here, trainer_state
from gpu.facts import record
from gpu.runs import difference, first_difference

pytestmark = pytest.mark.gpu

CACHE = "TORCHINDUCTOR_CACHE_DIR"


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
def test_two_deterministic_runs_give_the_same_bits(
    recipe: Path,
    tmp_path: Path,
    device: str,
    dtype: str,
    compiled: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if compiled and device == "cpu":
        pytest.skip("compiling for a CPU takes a minute, and proves nothing about a GPU's kernels")
    flag = str(compiled).lower()
    sets = (
        f"cluster.device={device}",
        f"train.forward_dtype={dtype}",
        "train.deterministic=true",
        f"train.compile={flag}",
        f"rollout.local.compile={flag}",
        "sampling.guidance_scale=4.5",
        "lora.dropout=0.1",
        "eval.datasets=[]",
    )
    for name in ("a", "b"):
        # each run compiles for itself: kernels that were measured once must not be found again
        monkeypatch.setenv(CACHE, str(tmp_path / f"cache-{name}"))
        torch._dynamo.reset()
        run_here(recipe, tmp_path / name, *sets)
    found = difference(trainer_state(tmp_path / "a", 2), trainer_state(tmp_path / "b", 2))
    if found != "equal":
        found += f"; first at {first_difference(tmp_path / 'a', tmp_path / 'b')}"
    record("deterministic twice", **{f"{dtype}, {'compiled' if compiled else 'eager'}": found})
    assert found == "equal"
    assert metric_rows(tmp_path / "a") == metric_rows(tmp_path / "b")
    assert not torch.are_deterministic_algorithms_enabled()
    assert os.environ.get("CUBLAS_WORKSPACE_CONFIG") is None

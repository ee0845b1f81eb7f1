"""Two ranks on two GPUs (two processes on a CPU): one rank's gradients, whole runs, resuming on one."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from e2e import metric_rows, run_here, summary_of, trained_weights
from gpu.facts import record
from torch import Tensor

pytestmark = pytest.mark.gpu

TWO = "cluster.actor_num_gpus_per_node=2"
PLAIN = (
    "optimizer.name=sgd",
    "optimizer.momentum=0",
    "optimizer.weight_decay=0",
    "optimizer.clip_grad=1e9",
    "optimizer.lr=1",
    "lora.init_weights=gaussian",
)
"""One step of this moves every weight by its gradient."""
ROUNDING = 1e-5


@pytest.fixture
def two(device: str) -> str:
    """The setting for two ranks, where there are two devices."""
    if device != "cpu" and torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    return TWO


def flat(tensors: dict[str, Tensor]) -> Tensor:
    """Return all values in the order of names."""
    return torch.cat([tensors[name].flatten().double() for name in sorted(tensors)])


def apart(ours: Tensor, theirs: Tensor) -> float:
    """Return the distance relative to the second."""
    return ((ours - theirs).norm() / theirs.norm()).item()


@pytest.mark.parametrize("kind", ["adapters", "adapters, base sharded", "full weights"])
def test_two_ranks_have_the_gradients_of_one(
    recipe: Path, tmp_path: Path, fp32: tuple[str, ...], two: str, kind: str
) -> None:
    sets = [*fp32, *PLAIN, "eval.datasets=[]", "checkpoint.save_interval=1", "train.num_rollout=1"]
    if kind == "full weights":
        sets[sets.index("optimizer.lr=1")] = "optimizer.lr=0.1"
        sets[sets.index("lora.init_weights=gaussian")] = "lora.enabled=false"
    run_here(recipe, tmp_path / "still", *sets, "optimizer.lr=0")
    start = flat(trained_weights(tmp_path / "still", 1))
    if kind == "adapters, base sharded":
        sets.append("train.shard_frozen=always")
    moves = []
    for name, more in (("one", ()), ("two", (two,))):
        run_here(recipe, tmp_path / name, *sets, *more)
        moves.append(flat(trained_weights(tmp_path / name, 1)) - start)
    found = apart(moves[1], moves[0])
    record("gradients, two ranks against one", **{kind: found})
    assert moves[0].norm() > 0
    assert found <= ROUNDING


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_a_run_on_two_ranks_is_that_on_one_up_to_rounding(
    recipe: Path, tmp_path: Path, device: str, two: str, dtype: str
) -> None:
    sets = (f"cluster.device={device}", f"train.forward_dtype={dtype}")
    for name, more in (("one", ()), ("two", (two,))):
        run_here(recipe, tmp_path / name, *sets, *more)
    one, other = (metric_rows(tmp_path / name) for name in ("one", "two"))
    assert [row["step"] for row in one] == [row["step"] for row in other]
    first, second = one[1], other[1]
    assert first["rollout/reward/raw_mean"] == second["rollout/reward/raw_mean"]
    norms = (first["train/grad_norm"], second["train/grad_norm"])
    parity = summary_of(tmp_path / "two")["parity"]
    record(f"two ranks, {dtype}", grad_norms=list(norms), parity=parity["worst"])
    assert abs(norms[0] / norms[1] - 1) <= (ROUNDING if dtype == "fp32" else 2e-2)
    assert parity["rows"] == 16
    assert parity["worst"] <= parity["limit"]


def test_a_run_of_two_ranks_goes_on_with_one(
    recipe: Path, tmp_path: Path, fp32: tuple[str, ...], two: str
) -> None:
    sets = (*fp32, "eval.datasets=[]", "checkpoint.save_interval=1")
    run_here(recipe, tmp_path / "moved", *sets, two, "train.num_rollout=2")
    saved = flat(trained_weights(tmp_path / "moved", 2))
    run_here(recipe, tmp_path / "moved", *sets, "train.num_rollout=4", resume=True)
    run_here(recipe, tmp_path / "straight", *sets, "train.num_rollout=4")
    ours = flat(trained_weights(tmp_path / "moved", 4))
    theirs = flat(trained_weights(tmp_path / "straight", 4))
    found = apart(ours - saved, theirs - flat(trained_weights(tmp_path / "straight", 2)))
    record("two ranks, then one", weights=apart(ours, theirs), last_two_iterations=found)
    assert [row["step"] for row in metric_rows(tmp_path / "moved")] == list(range(4))
    assert apart(ours, theirs) <= 1e-4

"""Rollout and trainer agree on the device: before training, after it, and whatever the micro-batch."""

from __future__ import annotations

from pathlib import Path

import pytest
from e2e import metric_rows, run_here, summary_of
from gpu.facts import record
from gpu.runs import open_run, pairs_of, roll_out, size_spread

from drl.loop import train

pytestmark = pytest.mark.gpu

SIZES = (1, 2, 4, 8, 16)
SETTINGS = {
    "cps": (),
    "guidance": ("sampling.guidance_scale=4.5",),
    "flow SDE with KL": ("sde.type=sde", "algorithm.kl_beta=0.1"),
}


@pytest.mark.parametrize("settings", SETTINGS)
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_parity_before_the_first_step_is_within_the_limit(
    recipe: Path, tmp_path: Path, device: str, dtype: str, settings: str
) -> None:
    device_sets = (f"cluster.device={device}", f"train.forward_dtype={dtype}")
    run_here(recipe, tmp_path / "run", *device_sets, *SETTINGS[settings], "eval.datasets=[]")
    parity = summary_of(tmp_path / "run")["parity"]
    record(f"parity {dtype}", **{settings: parity["worst"], "limit": parity["limit"]})
    assert parity["rows"] == 16
    assert parity["worst"] <= parity["limit"]


def test_the_first_update_is_on_policy_and_moves_the_weights(
    recipe: Path, tmp_path: Path, bf16: tuple[str, ...]
) -> None:
    run_here(recipe, tmp_path / "run", *bf16, "eval.datasets=[]", "train.num_steps_per_rollout=2")
    first = metric_rows(tmp_path / "run")[0]
    record("first update", ratio_abs_minus_1=first["train/ratio_abs_minus_1_update_0"])
    assert first["train/ratio_abs_minus_1_update_0"] < 1e-3
    assert first["train/ratio_abs_minus_1_update_1"] > 0
    assert first["train/grad_norm"] > 0


@pytest.mark.parametrize("weights", ["fp32", "forward"])
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_parity_holds_once_adapters_are_trained_and_merged(
    recipe: Path, tmp_path: Path, device: str, dtype: str, weights: str
) -> None:
    sets = (
        f"cluster.device={device}",
        f"train.forward_dtype={dtype}",
        f"rollout.local.weights={weights}",
        "eval.datasets=[]",
    )
    with open_run(recipe, tmp_path / "run", *sets) as run:
        train(run)
        _, shards = roll_out(run, rollout_id=2)
        report = run.trainer.replay(shards)
        record(f"parity {dtype} after training", **{f"{weights} engine": report.worst})
        assert report.rows == 16
        assert report.worst <= run.recipe.trust.max_log_prob_diff


@pytest.mark.parametrize("kind", ["cps", "sde"])
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_the_limit_is_above_what_the_micro_batch_size_changes(
    recipe: Path, tmp_path: Path, device: str, dtype: str, kind: str
) -> None:
    sets = (f"cluster.device={device}", f"train.forward_dtype={dtype}", f"sde.type={kind}")
    with open_run(recipe, tmp_path / "run", *sets, "eval.datasets=[]") as run:
        train(run)
        _, shards = roll_out(run, rollout_id=2)
        pairs = pairs_of(shards)
        assert len(pairs) == SIZES[-1]
        spread = size_spread(run, pairs, SIZES)
        record(f"micro-batch spread {dtype} {kind}", **{str(n): far for n, far in spread.items()})
        assert max(spread.values()) <= run.recipe.trust.max_log_prob_diff

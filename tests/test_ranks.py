"""Whole runs on two ranks, and the gradients of a real model on one, two and four."""

from __future__ import annotations

import json
import os
import pickle
import re
import signal
import time
from collections.abc import Callable
from functools import partial
from multiprocessing import active_children
from pathlib import Path
from typing import Any

import pytest
import torch
from e2e import metric_rows, run_here, set_words, start_run, summary_of, write_recipe
from ranked_sd3 import find_gradients, record
from safetensors.torch import load_file

from drl.cluster.ranks import RankedTrainer, RankGroup
from drl.errors import RankError
from drl.model.parallel import RankSettings
from drl.trainers import check_plugins

TWO = "cluster.actor_num_gpus_per_node=2"
ROUNDING = {"train/approx_kl", "train/log_prob_mean_abs_diff"}
"""Figures that are 0 but for rounding before the first optimizer step."""


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory, checkpoint: Path) -> dict[str, Any]:
    """One rollout of seven samples for adapters and one for full weights, and their gradients alone."""
    root = tmp_path_factory.mktemp("ranks")
    recipe = write_recipe(root, checkpoint)
    folders = {name: root / name for name in ("lora", "full")}
    for folder in folders.values():
        folder.mkdir()
    specs = {
        "lora": record(recipe, folders["lora"], (1, 2, 4)),
        "full": record(recipe, folders["full"], (1, 2, 4), "lora.enabled=false"),
    }
    return {"specs": specs, "folders": folders}


@pytest.mark.parametrize("world", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_gradients_are_those_of_one_rank(recorded: dict[str, Any], world: int) -> None:
    group = RankGroup(RankSettings(world=world, device="cpu"))
    build = partial(find_gradients, recorded["specs"], recorded["folders"])
    RankedTrainer(group.start(build, build), group).close()
    for name, folder in recorded["folders"].items():
        right = load_file(folder / "gradients-1.safetensors")
        found = load_file(folder / f"gradients-{world}.safetensors")
        assert found.keys() == right.keys()
        largest = max(gradient.abs().max().item() for gradient in right.values())
        assert largest > 0
        for key, gradient in found.items():
            torch.testing.assert_close(
                gradient, right[key], rtol=1e-4, atol=1e-6 * largest, msg=f"{name}: {key}"
            )
        parity, report = pickle.loads((folder / f"report-{world}").read_bytes())
        parity_alone, alone = pickle.loads((folder / "report-1").read_bytes())
        assert parity.rows == parity_alone.rows == 14
        assert parity.worst < 1e-5
        assert report.metrics["train/grad_norm"] == pytest.approx(
            alone.metrics["train/grad_norm"], rel=1e-5
        )


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory, checkpoint: Path) -> Callable[..., list[Path]]:
    """Run the tiny recipe with some settings on one rank and on two."""

    def run(*sets: str) -> list[Path]:
        root = tmp_path_factory.mktemp("run")
        recipe = write_recipe(root, checkpoint)
        run_here(recipe, root / "one", *sets)
        run_here(recipe, root / "two", TWO, *sets)
        assert not active_children()
        return [root / "one", root / "two"]

    return run


def check_same_figures(one: Path, two: Path) -> None:
    for left, right in zip(metric_rows(one), metric_rows(two), strict=True):
        assert left.keys() == right.keys()
        for key, value in left.items():
            if key.startswith(("rollout/", "eval/", "reward")) and isinstance(value, float):
                assert right[key] == pytest.approx(value, rel=1e-4), key
            elif key in ROUNDING:
                assert right[key] == pytest.approx(value, abs=1e-6), key
            elif key.startswith("train/"):
                assert right[key] == pytest.approx(value, rel=1e-3, abs=1e-6), key


def test_two_ranks_train_adapters_as_one_does(runs: Callable[..., list[Path]]) -> None:
    one, two = runs("algorithm.kl_beta=0.1", "sampling.guidance_scale=2.0")
    check_same_figures(one, two)
    assert summary_of(two)["parity"]["worst"] == 0.0
    left, right = (load_file(run / "adapter" / "adapter_model.safetensors") for run in (one, two))
    assert left.keys() == right.keys()
    assert all(left[name].shape == right[name].shape for name in left)


@pytest.mark.slow
def test_two_ranks_train_full_weights_as_one_does(runs: Callable[..., list[Path]]) -> None:
    one, two = runs(
        "lora.enabled=false",
        "train.num_steps_per_rollout=2",
        "model.load=all_ranks",
        "optimizer.lr=1e-5",
    )
    check_same_figures(one, two)
    assert summary_of(two)["parity"]["worst"] == 0.0
    left, right = (load_file(run / "model" / "transformer.safetensors") for run in (one, two))
    assert left.keys() == right.keys()
    for name, tensor in left.items():
        # AdamW's first steps are as long as the learning rate, whatever rounding does to a small gradient
        torch.testing.assert_close(tensor, right[name], rtol=0, atol=8 * 1e-5, msg=name)


def test_a_run_shows_its_ranks_before_it_starts(
    drl: Callable[..., tuple[int, str, str]], tmp_path: Path, checkpoint: Path
) -> None:
    recipe = write_recipe(tmp_path, checkpoint)
    code, out, _ = drl("run", str(recipe), "--dry-run", "--set", TWO)
    assert code == 0
    assert "2 micro-batches of 4 pairs on each of 2 rank(s)" in out
    code, _, err = drl("run", str(recipe), "--dry-run", "--set", "cluster.actor_num_nodes=2")
    assert code == 2
    assert "must be 1 with cluster.launcher = 'inline'" in err


def rank_of(driver: int) -> int | None:
    """Return the process of rank 1 of a driver, once it has both joined and built (it holds sockets)."""
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        try:
            parent = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
            command = (entry / "cmdline").read_bytes()
        except (FileNotFoundError, ProcessLookupError):
            continue
        if parent == driver and b"spawn_main" in command:
            return int(entry.name)
    return None


@pytest.mark.slow
def test_a_killed_rank_ends_the_run_with_its_name(tmp_path: Path, checkpoint: Path) -> None:
    recipe = write_recipe(tmp_path, checkpoint)
    sets = (TWO, "train.num_rollout=10000", "checkpoint.every_minutes=0")
    process = start_run(recipe, tmp_path / "run", *set_words(sets))
    deadline = time.monotonic() + 120
    metrics = tmp_path / "run" / "metrics.jsonl"
    while time.monotonic() < deadline:
        if metrics.is_file() and len(metrics.read_text().splitlines()) > 2:
            break
        time.sleep(0.1)
    victim = rank_of(process.pid)
    assert victim is not None
    os.kill(victim, signal.SIGKILL)
    began = time.monotonic()
    out, _ = process.communicate(timeout=60)
    assert time.monotonic() - began < 20
    assert process.returncode == 1
    assert "rank 1 of 2 failed: rank 1 died (SIGKILL: often the system, out of memory)" in out
    assert "Traceback" not in out


@pytest.mark.slow
def test_ctrl_c_saves_and_ends_every_rank(tmp_path: Path, checkpoint: Path) -> None:
    """A terminal sends SIGINT to the whole group of processes: ranks leave it to the driver."""
    recipe = write_recipe(tmp_path, checkpoint)
    process = start_run(recipe, tmp_path / "run", *set_words((TWO, "train.num_rollout=10000")))
    metrics = tmp_path / "run" / "metrics.jsonl"
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline:
        if metrics.is_file() and len(metrics.read_text().splitlines()) > 2:
            break
        time.sleep(0.1)
    victim = rank_of(process.pid)
    assert victim is not None
    os.kill(victim, signal.SIGINT)
    os.kill(victim, signal.SIGTERM)
    process.send_signal(signal.SIGINT)
    out, _ = process.communicate(timeout=60)
    assert process.returncode == 130, out
    assert not Path(f"/proc/{victim}").exists()
    saved = re.findall(r"saved iter_(\d+)", out)
    done = int((tmp_path / "run" / "checkpoints" / "latest_checkpointed_iteration.txt").read_text())
    assert done == int(saved[-1])
    # and on with one rank, from the state that two have written
    lines = run_here(recipe, tmp_path / "run", f"train.num_rollout={done + 1}", resume=True)
    assert any(line.startswith("report") for line in lines)
    steps = [json.loads(line)["step"] for line in metrics.read_text().splitlines()]
    assert steps[-1] == done


def test_other_plugins_than_the_drivers_are_named() -> None:
    same = [("drl-core", "0.1"), ("drl-reward-jpeg", "0.1")]
    check_plugins(same, list(reversed(same)), 1)
    with pytest.raises(RankError) as caught:
        check_plugins([("drl-core", "0.2"), ("acme", "1")], same, 3)
    assert str(caught.value).splitlines()[:4] == [
        "rank 3 has other plugins than the driver:",
        "  acme: 1, the driver has none",
        "  drl-core: 0.2, the driver has 0.1",
        "  drl-reward-jpeg: not there, the driver has 0.1",
    ]

"""Runs with a KL term: the base under an adapter, and full weights against the model of their start."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from e2e import checkpoint_folder, metric_rows, run_here, trained_weights, write_recipe

from drl.checkpoint.dcp import read_whole

QUIET = ("eval.before_train=false", "eval.after_train=false", "checkpoint.save_interval=1")
KL = ("algorithm.kl_beta=0.1", "sde.type=sde", "train.num_rollout=2")
STILL = ("ema.enabled=true", "ema.decay_init=1.0", "ema.decay_flat_steps=99")


@pytest.fixture(scope="module")
def recipe(tmp_path_factory: pytest.TempPathFactory, checkpoint: Path) -> Path:
    """The tiny recipe."""
    return write_recipe(tmp_path_factory.mktemp("reference"), checkpoint)


def test_full_weights_are_held_to_the_model_of_their_start(recipe: Path, tmp_path: Path) -> None:
    """An average that never moves is the reference where there is no adapter to switch off."""
    full = ("lora.enabled=false", "algorithm.ref_mode=ema", "optimizer.lr=1e-4")
    run_here(recipe, tmp_path / "run", *QUIET, *KL, *STILL, *full)
    first, second = metric_rows(tmp_path / "run")
    assert first["train/kl_loss"] == 0.0
    assert second["train/kl_loss"] > 0.0
    start, end = (read_whole(checkpoint_folder(tmp_path / "run", n) / "ema") for n in (1, 2))
    assert all(torch.equal(start[name], end[name]) for name in start)
    moved = trained_weights(tmp_path / "run", 2)
    assert max(float((moved[name] - start[name]).abs().max()) for name in start) > 0


def test_dropout_does_not_reach_the_reference(recipe: Path, tmp_path: Path) -> None:
    """B starts at 0, so the adapter's own dropout changes nothing and the KL of the first step is 0."""
    dropout = ("lora.dropout=0.5", "trust.parity=false")
    run_here(recipe, tmp_path / "run", *QUIET, *KL, *dropout)
    first, second = metric_rows(tmp_path / "run")
    assert first["train/kl_loss"] == 0.0
    assert second["train/kl_loss"] > 0.0


def test_a_heavier_kl_term_keeps_the_policy_nearer(recipe: Path, tmp_path: Path) -> None:
    distances = []
    for beta in (0.0, 1e3):
        folder = tmp_path / f"{beta}"
        sets = (f"algorithm.kl_beta={beta}", "algorithm.ref_mode=lora_base", "optimizer.name=sgd")
        rate = ("optimizer.lr=0.01", "train.num_steps_per_rollout=4", "train.num_rollout=2")
        run_here(recipe, folder, *QUIET, "sde.type=sde", *sets, *rate)
        weights = trained_weights(folder, 2)
        distances.append(
            sum(float(w.square().sum()) for name, w in weights.items() if "lora_B" in name)
        )
    assert distances[1] < distances[0]

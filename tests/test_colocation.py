"""Trainer and engine in one process: shared weights, applied adapters, taking turns on the device."""

from __future__ import annotations

import json
from importlib import import_module
from pathlib import Path

import pytest
import torch
from e2e import metric_rows, run_here, without_trust, write_recipe
from safetensors.torch import load_file
from torch import Tensor

from drl.assemble import launch_of
from drl.errors import BadInput, SyncError
from drl.interfaces.engine import Launch
from drl.lora import adapters
from drl.model.shared import base_tensors
from drl.run import Run

FP32 = ("train.forward_dtype=fp32",)


@pytest.fixture
def recipe(tmp_path: Path, checkpoint: Path) -> Path:
    """The tiny recipe of the end-to-end tests."""
    return write_recipe(tmp_path, checkpoint)


def adapter_of(run_dir: Path) -> dict[str, Tensor]:
    (file,) = run_dir.glob("adapter/**/adapter_model.safetensors")
    return load_file(file)


def same_adapters(one: Path, other: Path) -> bool:
    a, b = adapter_of(one), adapter_of(other)
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def parity_of(run_dir: Path) -> float:
    """Return the largest difference of log-probs before the first step."""
    rows = [row for row in metric_rows(run_dir) if "trust/parity_worst" in row]
    return float(rows[0]["trust/parity_worst"])


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Run, Launch]]:
    """Every run that started an engine, and what the engine was started with."""
    found: list[tuple[Run, Launch]] = []

    def noted(run: Run) -> Launch:
        found.append((run, launch_of(run)))
        return found[-1][1]

    monkeypatch.setattr("drl.assemble.launch_of", noted)
    return found


def test_shared_weights_give_the_run_of_a_copy_bit_for_bit(
    recipe: Path, tmp_path: Path, launches: list[tuple[Run, Launch]]
) -> None:
    ema = ("ema.enabled=true", "ema.rollout_policy=ema", "sampling.guidance_scale=2.0")
    for name in ("shared", "fp32"):
        run_here(recipe, tmp_path / name, *FP32, *ema, f"rollout.local.weights={name}")
    assert metric_rows(tmp_path / "shared") == metric_rows(tmp_path / "fp32")
    assert same_adapters(tmp_path / "shared", tmp_path / "fp32")
    (_, shared), (_, copied) = launches
    assert shared.shared["transformer"]
    assert copied.shared == {}
    rows = [json.loads(row) for row in (tmp_path / "shared/sync.jsonl").read_text().splitlines()]
    assert {row["verdict"] for row in rows} == {"checksum equal"}


def test_auto_shares_and_the_trainers_base_is_never_written(
    recipe: Path, tmp_path: Path, launches: list[tuple[Run, Launch]], checkpoint: Path
) -> None:
    run_here(recipe, tmp_path / "run", *FP32, "train.num_rollout=3")
    ((run, launch),) = launches
    base = dict(base_tensors(run.components["transformer"].module))
    shared = launch.shared["transformer"]
    assert shared.keys() == base.keys()
    assert all(base[name].data_ptr() == tensor.data_ptr() for name, tensor in shared.items())
    (file,) = (checkpoint / "transformer").glob("*.safetensors")
    for name, tensor in load_file(file).items():
        assert torch.equal(base[name], tensor), name


@pytest.mark.parametrize("dtype", ["bf16", pytest.param("fp32", marks=pytest.mark.slow)])
def test_applied_adapters_compute_what_the_trainer_computes_after_training_too(
    recipe: Path, tmp_path: Path, dtype: str
) -> None:
    forward = (f"train.forward_dtype={dtype}", "sampling.guidance_scale=2.0")
    run_here(recipe, tmp_path / "first", *forward, "rollout.local.adapters=applied")
    (trained,) = (tmp_path / "first/checkpoints").glob("iter_*2")
    again = (*forward, "train.num_rollout=3", f"checkpoint.load={trained.parent}")
    run_here(recipe, tmp_path / "applied", *again, "rollout.local.adapters=applied")
    assert parity_of(tmp_path / "applied") == 0.0
    run_here(recipe, tmp_path / "merged", *again, "trust.max_log_prob_diff=0.1")
    assert parity_of(tmp_path / "merged") > 0.0


def test_a_trainer_that_merges_needs_an_engine_with_a_copy_and_says_so(
    recipe: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pissa = (*FP32, "lora.init_weights=pissa", "train.num_rollout=1")
    run_here(recipe, tmp_path / "run", *pissa)
    told = capsys.readouterr()
    assert "its own copy of transformer's weights: its adapters are merged" in told.out + told.err
    for option, said in (("weights=shared", "no weights to share"), ("adapters=applied", "merged")):
        with pytest.raises(BadInput, match=said):
            run_here(recipe, tmp_path / option, *pissa, f"rollout.local.{option}")
        assert not (tmp_path / option).exists()


@pytest.mark.parametrize("weights", ["auto", pytest.param("fp32", marks=pytest.mark.slow)])
def test_taking_turns_changes_no_bit_and_resumes(
    recipe: Path, tmp_path: Path, weights: str
) -> None:
    ema = ("ema.enabled=true", "ema.rollout_policy=ema")
    plain = (*FP32, *ema, "eval.interval=1", f"rollout.local.weights={weights}")
    turns = (*plain, "cluster.offload=true", "checkpoint.save_interval=1")
    run_here(recipe, tmp_path / "plain", *plain, "train.num_rollout=3")
    for resume, length in ((False, 2), (True, 3)):
        run_here(recipe, tmp_path / "turns", *turns, f"train.num_rollout={length}", resume=resume)
    rows, right = (without_trust(metric_rows(tmp_path / name)) for name in ("turns", "plain"))
    assert [row for row in rows if row["step"] != 1] == [row for row in right if row["step"] != 1]
    assert same_adapters(tmp_path / "turns", tmp_path / "plain")
    times = json.loads((tmp_path / "turns/metrics.jsonl").read_text().splitlines()[-1])
    assert times["perf/offload_time"] > 0


def test_full_weights_take_turns_too(recipe: Path, tmp_path: Path) -> None:
    full = (*FP32, "lora.enabled=false", "optimizer.lr=1e-4", "train.num_rollout=2")
    run_here(recipe, tmp_path / "plain", *full)
    run_here(recipe, tmp_path / "turns", *full, "cluster.offload=true")
    assert metric_rows(tmp_path / "turns") == metric_rows(tmp_path / "plain")


def test_a_phase_that_fails_ends_the_run_with_its_own_words(
    recipe: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    launches: list[tuple[Run, Launch]],
) -> None:
    def broken(*_: object, **__: object) -> None:
        raise SyncError("no room for the weights")

    monkeypatch.setattr(import_module("drl_engine_local.engine"), "move", broken)
    with pytest.raises(SyncError, match="no room for the weights"):
        run_here(recipe, tmp_path / "run", *FP32, "cluster.offload_rollout=true")
    ((run, _),) = launches
    assert run.engines is not None
    assert run.engines.handles() == ()  # it was stopped
    assert adapters(run.components["transformer"].module)


def test_a_run_that_only_samples_shares_the_start_weights_too(
    recipe: Path, tmp_path: Path, launches: list[tuple[Run, Launch]]
) -> None:
    only = ("debug.rollout_only=true", "lora.init_weights=random", "train.num_rollout=1")
    run_here(recipe, tmp_path / "run", *FP32, *only, "cluster.offload_train=true")
    ((run, launch),) = launches
    assert launch.shared["transformer"]
    assert not run.residence.trainer  # it sleeps since the sync


@pytest.mark.parametrize("option", ["weights=shared", "adapters=applied"])
@pytest.mark.parametrize("only", ["debug.rollout_only=true", "train.num_rollout=0"])
def test_a_recipe_whose_weights_are_never_pushed_samples_with_the_checkpoints(
    recipe: Path, tmp_path: Path, only: str, option: str
) -> None:
    """There is nothing to share or to apply yet: both options change nothing, and are no mistake."""
    for name, setting in (
        ("plain", "rollout.local.weights=auto"),
        (option, f"rollout.local.{option}"),
    ):
        run_here(recipe, tmp_path / name, *FP32, only, setting)
    assert metric_rows(tmp_path / option) == metric_rows(tmp_path / "plain")


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["never", "always"])
def test_the_first_of_two_ranks_shares_what_it_holds_whole(
    recipe: Path,
    tmp_path: Path,
    launches: list[tuple[Run, Launch]],
    capsys: pytest.CaptureFixture[str],
    layout: str,
) -> None:
    ranks = ("cluster.actor_num_gpus_per_node=2", f"train.shard_frozen={layout}")
    run_here(recipe, tmp_path / "turns", *FP32, *ranks, "cluster.offload=true")
    ((_, launch),) = launches
    told = capsys.readouterr()
    assert bool(launch.shared) == (layout == "never")
    assert ("sharded over the ranks" in told.out + told.err) == (layout == "always")
    run_here(recipe, tmp_path / "plain", *FP32, *ranks)
    assert metric_rows(tmp_path / "plain") == metric_rows(tmp_path / "turns")

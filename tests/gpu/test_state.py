"""Training state of the device: saved and restored, saved while training goes on, resumed after a kill."""

from __future__ import annotations

import math
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from e2e import metric_rows, run_here, set_words, start_run, trainer_state, without_trust
from gpu.facts import record
from gpu.runs import difference, open_run
from torch import Tensor

from drl.loop import train
from drl.run import Run

pytestmark = pytest.mark.gpu

SHORT = ("eval.datasets=[]", "train.num_rollout=1")
KINDS = {
    "adapters": (),
    "full weights": ("lora.enabled=false", "optimizer.lr=1e-4"),
    "adapters with EMA": ("ema.enabled=true", "ema.rollout_policy=ema"),
}


@contextmanager
def trained_run(recipe: Path, folder: Path, *sets: str) -> Iterator[Run]:
    """Open a run and train it for one iteration."""
    with open_run(recipe, folder / "run", *sets, *SHORT) as run:
        train(run)
        yield run


def held(run: Run) -> dict[str, Tensor]:
    """Return copies of everything that a checkpoint of the trainer keeps, on the CPU."""
    trainer = run.trainer
    named = dict(trainer.named_parameters())
    tensors = {name: p.detach() for name, p in named.items()}
    for name, parameter in named.items():
        for key, value in trainer.optimizer.state[parameter].items():
            tensors[f"{name}|{key}"] = value
    if trainer.ema is not None:
        tensors |= {f"ema {name}": value for name, value in trainer.ema.state().items()}
    return {name: tensor.to("cpu", copy=True) for name, tensor in tensors.items()}


@torch.no_grad()
def spoil(run: Run) -> None:
    """Change every trained weight and every moment in place, as training does."""
    for _, parameter in run.trainer.named_parameters():
        parameter.add_(1.0)
        for key, value in run.trainer.optimizer.state[parameter].items():
            if key != "step":
                value.mul_(3.0)


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_saved_comes_back_to_the_bit(
    recipe: Path, tmp_path: Path, bf16: tuple[str, ...], kind: str
) -> None:
    with trained_run(recipe, tmp_path, *bf16, *KINDS[kind]) as run:
        folder = tmp_path / "state"
        folder.mkdir()
        before = held(run)
        run.trainer.save(folder)
        spoil(run)
        assert difference(held(run), before) != "equal"
        assert run.trainer.restore(folder) == 1
        assert difference(held(run), before) == "equal"
        devices = {p.device.type for _, p in run.trainer.named_parameters()}
        assert devices == {torch.device(run.context.device).type}


@pytest.mark.parametrize("kind", KINDS)
def test_a_save_in_the_background_holds_the_moment_at_which_it_began(
    recipe: Path, tmp_path: Path, bf16: tuple[str, ...], kind: str
) -> None:
    with trained_run(recipe, tmp_path, *bf16, *KINDS[kind]) as run:
        for number in range(3):  # later saves reuse the buffers of earlier ones
            folder = tmp_path / f"state-{number}"
            folder.mkdir()
            before = held(run)
            future = run.trainer.begin_save(folder)
            spoil(run)
            changed = held(run)
            future.result(timeout=60)
            assert difference(held(run), changed) == "equal"
            run.trainer.restore(folder)
            assert difference(held(run), before) == "equal"
            spoil(run)


def caught_writing(run_dir: Path, process: subprocess.Popen[str], number: int) -> bool:
    """Wait for the checkpoint of that number; True when it is still being written, False when it is there.

    A fast device writes between two looks: the run is killed a moment later then, not at its end.
    """
    folder = run_dir / "checkpoints"
    deadline = time.monotonic() + 120
    while process.poll() is None and time.monotonic() < deadline:
        if any(folder.glob(f".writing-iter_{number:07d}*")):
            return True
        if (folder / f"iter_{number:07d}").is_dir():
            return False
        time.sleep(0.001)
    pytest.fail(f"no checkpoint {number} within two minutes, or the run ended before it")


@pytest.mark.parametrize("dtype", ["fp32", "fp16"])
def test_a_run_killed_while_it_saves_resumes_to_the_same_bits(
    recipe: Path, tmp_path: Path, device: str, dtype: str
) -> None:
    sets = (
        f"cluster.device={device}",
        f"train.forward_dtype={dtype}",
        "train.num_rollout=5",
        "checkpoint.save_interval=1",
        "eval.datasets=[]",
    )
    process = start_run(recipe, tmp_path / "killed", *set_words(sets))
    caught = caught_writing(tmp_path / "killed", process, 2)
    process.kill()
    process.wait()
    assert not (tmp_path / "killed" / "summary.json").exists()
    run_here(recipe, tmp_path / "killed", *sets, resume=True)
    for name in ("straight", "repeated"):
        run_here(recipe, tmp_path / name, *sets)
    killed, straight, repeated = (
        trainer_state(tmp_path / name, 5) for name in ("killed", "straight", "repeated")
    )
    resumed, again = difference(killed, straight), difference(repeated, straight)
    record(f"killed while saving, {dtype}", caught=caught, resumed=resumed, repeated=again)
    assert resumed == "equal" or again != "equal", resumed
    rows = [without_trust(metric_rows(tmp_path / name)) for name in ("killed", "straight")]
    assert [row["step"] for row in rows[0]] == list(range(5))
    if again == "equal":
        assert rows[0] == rows[1]


def test_fp16_trains_under_a_loss_scale(recipe: Path, tmp_path: Path, device: str) -> None:
    sets = (f"cluster.device={device}", "train.forward_dtype=fp16", "eval.datasets=[]")
    run_here(recipe, tmp_path / "run", *sets, "train.num_rollout=4")
    rows = metric_rows(tmp_path / "run")
    scales = [row["train/loss_scale"] for row in rows]
    skipped = sum(row["train/overflow_steps"] for row in rows)
    norms = [row["train/grad_norm"] for row in rows if not row["train/overflow_steps"]]
    record("fp16", scales=scales, overflows=skipped, grad_norms=norms)
    assert all(math.log2(scale).is_integer() for scale in scales)
    assert skipped < 4
    assert norms
    assert all(0 < norm < math.inf for norm in norms)

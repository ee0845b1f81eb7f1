"""Trainer and engine on one device: memory that is shared, memory that is given back, and the same samples."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from e2e import metric_rows, run_here
from gpu.facts import record
from gpu.runs import free, open_run, roll_out
from gpu.test_sharding import model_of, predict, ranks, sharded  # noqa: F401  # a fixture among them
from torch import Tensor

from drl import loop
from drl.interfaces.engine import Memory
from drl.loop import train
from drl.model.parallel import Ranks
from drl.model.shared import base_tensors
from drl.model.sleeping import Bed
from drl.run import Run
from drl.stages.rollout import training_sampling
from drl.stages.sync import sync
from drl.types import Prompt, RolloutRequest

pytestmark = pytest.mark.gpu

QUIET = ("eval.datasets=[]", "sampling.guidance_scale=2.0")


def held() -> int:
    """Return the bytes that tensors hold on the GPU; 0 without one."""
    if not torch.cuda.is_available():
        return 0
    free()
    torch.cuda.synchronize()
    return torch.cuda.memory_allocated()


def frees(work: Callable[[], object]) -> int:
    """Return how many bytes a call frees on the GPU."""
    before = held()
    work()
    return before - held()


def engine_of(run: Run) -> Any:
    """Return the engine."""
    assert run.engines is not None
    return run.engines.engine


def own_bytes(run: Run) -> int:
    """Return what the engine holds of its own."""
    return sum(tensor.nbytes for tensor in engine_of(run).store.own())


def base_bytes(run: Run) -> int:
    """Return the bytes of the trainer's frozen weights."""
    (one,) = run.components.values()
    return sum(tensor.nbytes for _, tensor in base_tensors(one.module))


def pictures(run: Run) -> Tensor:
    """Return four pictures of fixed seeds as the engine makes them now, on the CPU."""
    assert run.engines is not None
    request = RolloutRequest(
        prompt=Prompt(row=0, text="a sign"),
        group_index=0,
        members=(0, 1, 2, 3),
        seeds=(5, 6, 7, 8),
        sampling=training_sampling(run.recipe),
        sde_steps=(),
        kept_latents=(),
        evaluation=True,
    )
    made = run.background.run(run.engines.generate(request))
    return torch.stack([one.media.pixels.cpu() for one in made if one.media is not None])


def test_one_copy_of_the_base_serves_both(
    recipe: Path, tmp_path: Path, bf16: tuple[str, ...]
) -> None:
    own = {}
    for weights in ("shared", "forward"):
        option = f"rollout.local.weights={weights}"
        with open_run(recipe, tmp_path / weights, *bf16, *QUIET, option) as run:
            sync(run, 0)
            own[weights], base = own_bytes(run), base_bytes(run)
            (module,) = [one.module for one in run.components.values()]
            here = {tensor.data_ptr() for _, tensor in base_tensors(module)}
            there = {tensor.data_ptr() for tensor in engine_of(run).store.own()}
            assert not here & there
    assert own["shared"] < base <= own["forward"]
    record("colocation", **{f"engine's own bytes, {name}": size for name, size in own.items()})


@pytest.mark.parametrize("weights", ["shared", "forward"])
def test_who_leaves_frees_memory_and_comes_back_the_same(
    recipe: Path, tmp_path: Path, bf16: tuple[str, ...], device: str, weights: str
) -> None:
    option = f"rollout.local.weights={weights}"
    with open_run(recipe, tmp_path / "run", *bf16, *QUIET, option) as run:
        assert run.engines is not None
        engines, trainer = run.engines, run.trainer
        sync(run, 0)
        before = pictures(run)
        _, shards = roll_out(run)
        list(trainer.train(shards))  # the optimizer has state now
        shares = weights == "shared"
        asleep = frees(lambda: trainer.sleep(frozen=not shares))
        released = frees(lambda: [engines.release(what) for what in (Memory.REST, Memory.WEIGHTS)])
        if device.startswith("cuda"):
            moments = 8 * sum(p.numel() for _, p in trainer.named_parameters())
            assert asleep >= moments + (0 if shares else base_bytes(run))
            assert released >= own_bytes(run) > 0
        for what in (Memory.WEIGHTS, Memory.REST):
            engines.resume(what)
        assert torch.equal(pictures(run), before)  # the trainer still sleeps
        trainer.wake()
        sync(run, 1)
        assert not torch.equal(pictures(run), before)
        _, shards = roll_out(run)
        assert all(report.skipped is None for report in trainer.train(shards))


def test_taking_turns_changes_no_figure(
    recipe: Path, tmp_path: Path, fp32: tuple[str, ...]
) -> None:
    for name, sets in (("plain", ()), ("turns", ("cluster.offload=true",))):
        run_here(recipe, tmp_path / name, *fp32, *QUIET, "train.deterministic=true", *sets)
    assert metric_rows(tmp_path / "plain") == metric_rows(tmp_path / "turns")


def test_applied_adapters_keep_parity_after_training(
    recipe: Path, tmp_path: Path, bf16: tuple[str, ...]
) -> None:
    """The trainer scores four rows at a time, as the engine samples them."""
    applied = ("rollout.local.adapters=applied", "optimizer.lr=0.05")
    with open_run(recipe, tmp_path / "run", *bf16, *QUIET, *applied) as run:
        train(run)
        _, shards = roll_out(run, 2)
        report = run.trainer.replay(shards)
    assert report.rows > 0
    record("parity of applied adapters", worst=report.worst)
    assert report.worst == 0.0


@pytest.mark.parametrize("adapters", ["merged", "applied"])
def test_recorded_forwards_change_no_figure_of_a_run(
    recipe: Path, tmp_path: Path, bf16: tuple[str, ...], device: str, adapters: str
) -> None:
    """Graphs read the trainer's weights and the adapters of every later sync, wherever those lie."""
    if not device.startswith("cuda"):
        pytest.skip("CUDA graphs need a GPU")
    sets = (*bf16, *QUIET, "train.deterministic=true", f"rollout.local.adapters={adapters}")
    for flag in ("false", "true"):
        run_here(recipe, tmp_path / flag, *sets, f"rollout.local.cuda_graphs={flag}")
    assert metric_rows(tmp_path / "true") == metric_rows(tmp_path / "false")


@pytest.mark.parametrize("adapters", [False, True], ids=["full weights", "adapters"])
def test_sharded_weights_sleep_and_wake_the_same(
    checkpoint: Path,
    ranks: Ranks,  # noqa: F811
    device: str,
    adapters: bool,
) -> None:
    model = sharded(model_of(checkpoint, device, adapters=adapters), ranks, device, "bf16")
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-3)

    def step() -> None:
        predict(model, device, "bf16").float().square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    def seen() -> Tensor:
        with torch.no_grad():
            return predict(model, device, "bf16")

    step()
    before = seen()
    bed = Bed(torch.device(device))
    size = sum(parameter.nbytes for parameter in model.parameters())
    freed = frees(lambda: bed.lie_down({"net": model}, optimizer, (), frozen=True))
    assert all(parameter.device.type == "cpu" for parameter in model.parameters())
    if device.startswith("cuda"):
        assert freed >= 0.9 * size
    bed.get_up(optimizer, ())
    assert torch.equal(seen(), before)
    step()
    assert not torch.equal(seen(), before)


@pytest.mark.parametrize("graphs", [False, True], ids=["launched", "recorded"])
def test_every_iteration_begins_with_the_same_memory(
    device: str, recipe: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, graphs: bool
) -> None:
    """What an iteration made ends with it; the collector of cycles has no part in that."""
    if graphs and device == "cpu":
        pytest.skip("a CPU has no CUDA graphs")
    found: list[int] = []

    def gathered(run: Run, rollout_id: int) -> Any:
        if torch.cuda.is_available():
            torch.cuda.synchronize()
            found.append(torch.cuda.memory_allocated())
        return gather(run, rollout_id)

    gather = loop.gather
    monkeypatch.setattr(loop, "gather", gathered)
    sets = (
        f"cluster.device={device}",
        f"rollout.local.cuda_graphs={str(graphs).lower()}",
        "eval.datasets=[]",
        "train.num_rollout=5",
        "checkpoint.asynchronous=false",  # a save that is still written keeps its copy of the state
    )
    run_here(recipe, tmp_path / "run", *sets)
    record("bytes at the start of iterations", **{"recorded" if graphs else "launched": found[2:]})
    # the latents of one rollout alone are 8 x 5 x 1 KiB
    assert not found or max(found[2:]) - min(found[2:]) < 2**15

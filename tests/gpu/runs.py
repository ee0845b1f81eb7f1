"""Runs on the device under test: opened ones to look inside, and what two runs have in common."""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

import torch
from e2e import metric_rows
from torch import Tensor

from drl.api import Pair, Predictions, Rollout, Shard
from drl.assemble import assemble
from drl.catalog import Catalog
from drl.cluster.background import Background
from drl.config import load_recipe
from drl.launch import Start, close, start
from drl.observe.directory import RunDirectory
from drl.run import Run
from drl.stages.advantage import estimate
from drl.stages.collect import collect
from drl.stages.loss import complete_inputs, make_batch, predict, score_transition
from drl.stages.pairs import make_shards
from drl.stages.shards import filled

CUBLAS_WORKSPACE = "CUBLAS_WORKSPACE_CONFIG"


@contextmanager
def open_run(recipe: Path, run_dir: Path, *sets: str) -> Iterator[Run]:
    """Build and start a run, and close it whatever happens; nothing is trained yet."""
    catalog = Catalog.load()
    loaded = load_recipe(recipe, sets=sets, catalog=catalog)
    background = Background()
    run = None
    with RunDirectory.create_at(run_dir) as directory:
        try:
            run = assemble(loaded, catalog, directory, background)
            start(run, Start(), print)
            yield run
        finally:
            if run is not None:
                close(run, None)
            background.close()
            del run
            free()


@contextmanager
def no_waiting(device: str) -> Iterator[None]:
    """Let torch raise where it would make the host wait for the device; on the CPU nothing can."""
    if not device.startswith("cuda"):
        yield
        return
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def free() -> None:
    """Give the device's memory back."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def roll_out(run: Run, rollout_id: int = 0) -> tuple[Rollout, list[Shard]]:
    """Return one rollout and the shards that would be trained on."""
    rollout = collect(run, rollout_id)
    return rollout, make_shards(run, rollout, estimate(run, rollout))


def pairs_of(shards: Sequence[Shard]) -> list[Pair]:
    """Return the pairs that count, in the order of training."""
    return [
        pair
        for shard in shards
        for window in shard.windows
        for batch in window
        for pair in batch
        if pair.weight
    ]


@torch.no_grad()
def log_probs(run: Run, pairs: Sequence[Pair], size: int) -> Tensor:
    """Return the trained weights' log-prob of each pair, ``(N,)`` on the CPU, scored ``size`` at a time."""
    forward, context = run.trainer.forward, run.trainer.context
    scores = []
    for first in range(0, len(pairs), size):
        batch = make_batch(filled(pairs[first : first + size], pairs[0], size), forward.device)
        inputs = complete_inputs(forward, batch, forward.loss.prepare(batch, context))
        predictions = Predictions(trained=predict(forward, batch, inputs))
        scored = score_transition(forward, batch, predictions)
        assert scored is not None
        scores.append(torch.stack(list(scored.log_prob_B.values())).sum(0).cpu())
    return torch.cat(scores)[: len(pairs)]


def size_spread(run: Run, pairs: Sequence[Pair], sizes: Sequence[int]) -> dict[int, float]:
    """Return, per micro-batch size, the largest distance from the log-probs at the first size."""
    first = log_probs(run, pairs, sizes[0])
    return {size: (log_probs(run, pairs, size) - first).abs().max().item() for size in sizes}


def difference(left: Mapping[str, Tensor], right: Mapping[str, Tensor]) -> str:
    """Return "equal" when both hold the same bits, else how much of them differs."""
    if left.keys() != right.keys():
        return f"other names: {sorted(left.keys() ^ right.keys())[:3]}"
    unequal = [name for name in left if not torch.equal(left[name], right[name])]
    if not unequal:
        return "equal"
    worst = max((left[name] - right[name]).abs().max().item() for name in unequal)
    return f"{len(unequal)} of {len(left)} tensors differ, by up to {worst:.1e}"


def first_difference(left: Path, right: Path) -> str:
    """Name the first figures that differ in the metrics of two runs: rollout or training?"""
    for a, b in zip(metric_rows(left), metric_rows(right), strict=True):
        names = sorted(name for name in a.keys() | b.keys() if a.get(name) != b.get(name))
        if names:
            return f"iteration {a['step']}: {', '.join(names[:4])}"
    return "no figure differs"


@contextmanager
def deterministic() -> Iterator[None]:
    """Let torch choose deterministic kernels only; it raises RuntimeError where it has none."""
    before = os.environ.get(CUBLAS_WORKSPACE)
    os.environ[CUBLAS_WORKSPACE] = ":4096:8"
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)
        if before is None:
            del os.environ[CUBLAS_WORKSPACE]
        else:
            os.environ[CUBLAS_WORKSPACE] = before

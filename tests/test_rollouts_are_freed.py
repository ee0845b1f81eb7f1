"""Memory of a run: an iteration's tensors are gone when the next one begins, its pairs before the sync."""

from __future__ import annotations

import gc
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from weakref import ref

import pytest
from e2e import run_here, write_recipe
from torch import Tensor

from drl import loop
from drl.run import Run
from drl.types import Advantages, Rollout, Shard

MODES = {
    "trained": ("eval.interval=1", "checkpoint.save_interval=1"),
    "several windows": ("train.num_steps_per_rollout=2", "sampling.guidance_scale=4.0"),
    "collected alone": ("debug.rollout_only=true", "eval.before_train=false"),
    "dumped": ("debug.dump_details={folder}",),
}
PATIENCE_S = 2.0
"""How long a thread of the engine may take to leave the function in which it handed its samples over."""


@dataclass
class Watch:
    """Holds tensors weakly, and counts those that something else still holds."""

    paths: list[ref[Tensor]] = field(default_factory=list)
    pixels: list[ref[Tensor]] = field(default_factory=list)
    pairs: list[ref[Tensor]] = field(default_factory=list)
    found: list[str] = field(default_factory=list)

    def look(self, where: str, *kinds: str) -> None:
        """Note which tensors of these kinds are alive, and stay so."""
        for kind in kinds:
            deadline = time.monotonic() + PATIENCE_S
            while (alive := self.alive(kind)) and time.monotonic() < deadline:
                time.sleep(0.01)
            if alive:
                self.found.append(f"{alive} tensors of {kind} {where}")

    def alive(self, kind: str) -> int:
        """Count the tensors of a kind that something still holds."""
        return sum(one() is not None for one in getattr(self, kind))

    def take(self, rollout: Rollout) -> None:
        """Watch the tensors of a rollout that are its own; prompts share their condition records."""
        for sample in rollout.samples:
            assert sample.trajectory is not None
            assert sample.media is not None
            self.paths += map(ref, sample.trajectory.latents.values())
            self.pixels.append(ref(sample.media.pixels))


def tensors_of(shards: Iterable[Shard]) -> Iterator[Tensor]:
    for shard in shards:
        for pair in (pair for window in shard.windows for batch in window for pair in batch):
            yield from pair.tensors.values()


@pytest.fixture
def watch(monkeypatch: pytest.MonkeyPatch) -> Iterator[Watch]:
    """Watches the stages of the loop; a reference cycle counts as a holder, for it may live long."""
    watch, gather, make_shards, sync = Watch(), loop.gather, loop.make_shards, loop.sync

    def gathered(run: Run, rollout_id: int) -> Rollout:
        watch.look(f"while rollout {rollout_id} is made", "paths", "pixels", "pairs")
        rollout = gather(run, rollout_id)
        watch.take(rollout)
        return rollout

    def sharded(run: Run, rollout: Rollout, advantages: Advantages | None) -> list[Shard]:
        shards = make_shards(run, rollout, advantages)
        watch.pairs += map(ref, tensors_of(shards))
        return shards

    def synced(run: Run, version: int) -> None:
        watch.look(f"while version {version} is pushed", "pairs")
        sync(run, version)

    for name, stage in {"gather": gathered, "make_shards": sharded, "sync": synced}.items():
        monkeypatch.setattr(loop, name, stage)
    gc.disable()
    yield watch
    gc.enable()


@pytest.mark.parametrize("mode", MODES)
def test_nothing_holds_a_rollout_after_its_iteration(
    tmp_path: Path, checkpoint: Path, watch: Watch, mode: str
) -> None:
    recipe = write_recipe(tmp_path, checkpoint)
    sets = [text.format(folder=tmp_path / "dumps") for text in MODES[mode]]
    run_here(recipe, tmp_path / "run", "train.num_rollout=3", *sets)
    watch.look("when the run is over", "paths", "pixels", "pairs")
    assert len(watch.paths) == 24
    assert bool(watch.pairs) == (mode != "collected alone")
    assert watch.found == []

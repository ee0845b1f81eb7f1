"""The loop sets aside what lives after its first iteration, and the collector sees everything again at its end."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest
from e2e import write_recipe
from gpu.runs import open_run
from torch import Tensor

from drl.api import Context, Logger, RunFacts, Sample
from drl.loop import roll_out, train


class Frozen(Logger):
    """Notes how many objects are set aside whenever an iteration is logged, and what is left of earlier ones."""

    def __init__(self) -> None:
        super().__init__(None, Context())
        self.counts: list[int] = []
        self.latents: list[weakref.ref[Tensor]] = []
        self.left: list[int] = []

    def start(self, run: RunFacts) -> None:
        """Nothing to open."""

    def close(self) -> None:
        """Nothing is open."""

    def metrics(self, step: int, values: Mapping[str, float]) -> None:
        self.counts.append(gc.get_freeze_count())

    def samples(self, step: int, samples: Sequence[Sample]) -> None:
        self.left.append(sum(latents() is not None for latents in self.latents))
        for sample in samples:
            assert sample.trajectory is not None
            self.latents += map(weakref.ref, sample.trajectory.latents.values())


@pytest.mark.parametrize("work", [train, roll_out])
def test_what_lives_after_the_first_iteration_is_set_aside_until_the_end(
    tmp_path: Path, checkpoint: Path, impatient: None, work
) -> None:
    recipe = write_recipe(tmp_path, checkpoint)
    with open_run(recipe, tmp_path / "run", "eval.datasets=[]", "train.num_rollout=3") as run:
        noted = Frozen()
        run.loggers = [*run.loggers, noted]
        gc.disable()  # a rollout must go with its last reference, also one that was set aside
        try:
            work(run)
        finally:
            gc.enable()
    first, *later = noted.counts
    assert first > 100_000
    assert all(0 < count <= first for count in later)
    assert gc.get_freeze_count() == 0
    assert noted.latents
    assert noted.left == [0, 0, 0]

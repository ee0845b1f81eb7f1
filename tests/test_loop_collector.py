"""The loop sets aside what lives after its first iteration, and the collector sees everything again at its end."""

from __future__ import annotations

import gc
from collections.abc import Mapping
from pathlib import Path

import pytest
from e2e import write_recipe
from gpu.runs import open_run

from drl import collector
from drl.api import Context, Logger, RunFacts
from drl.loop import roll_out, train


class Frozen(Logger):
    """Notes how many objects are set aside whenever an iteration is logged."""

    def __init__(self) -> None:
        super().__init__(None, Context())
        self.counts: list[int] = []

    def start(self, run: RunFacts) -> None:
        """Nothing to open."""

    def close(self) -> None:
        """Nothing is open."""

    def metrics(self, step: int, values: Mapping[str, float]) -> None:
        self.counts.append(gc.get_freeze_count())


@pytest.mark.parametrize("work", [train, roll_out])
def test_what_lives_after_the_first_iteration_is_set_aside_until_the_end(
    tmp_path: Path, checkpoint: Path, monkeypatch: pytest.MonkeyPatch, work
) -> None:
    monkeypatch.setattr(collector, "PATIENCE_S", 0.0)
    recipe = write_recipe(tmp_path, checkpoint)
    with open_run(recipe, tmp_path / "run", "eval.datasets=[]", "train.num_rollout=3") as run:
        noted = Frozen()
        run.loggers = [*run.loggers, noted]
        work(run)
    first, *later = noted.counts
    assert first > 100_000
    assert all(0 < count <= first for count in later)
    assert gc.get_freeze_count() == 0

"""``PreferenceLogger``: best and worst sample of each group, as rows for the data source."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

from drl.api import Context, DrlError, Logger, RunFacts, Sample
from drl_loss_dpo.config import PreferenceLoggerConfig
from drl_loss_dpo.pictures import write_picture
from drl_loss_dpo.rows import CHOSEN, REJECTED

FOLDER, FILE = "preferences", "preferences.jsonl"


class PreferenceLogger(Logger):
    """Writes ``preferences/preferences.jsonl`` and its pictures into the run directory.

    A row is added once its pictures are there. A run that resumes at iteration k first drops the rows
    from k on: they are about to be made again.
    """

    def __init__(self, options: PreferenceLoggerConfig, context: Context) -> None:
        super().__init__(options, context)
        self._folder: Path | None = None

    def start(self, run: RunFacts) -> None:
        """Make the folder, and keep of its rows those of earlier iterations."""
        self._folder = run.run_dir / FOLDER
        self._folder.mkdir(exist_ok=True)
        file = self._folder / FILE
        before = file.read_text("utf-8").split("\n")[:-1] if file.exists() else []
        kept = [line for line in before if json.loads(line)["step"] < run.first]
        beside = file.with_suffix(".new")
        beside.write_text("".join(f"{line}\n" for line in kept), "utf-8")
        os.replace(beside, file)

    def metrics(self, step: int, values: Mapping[str, float]) -> None:
        """Leave the figures to other loggers."""

    def samples(self, step: int, samples: Sequence[Sample]) -> None:
        """Write the pairs of an iteration; groups in which no two rewards differ give none."""
        if self._folder is None:
            raise DrlError("logger preferences: samples() was called before start()")
        rows = [
            self._write(step, f"{step:05d}-{better.group_index:06d}-{number}", better, worse)
            for _, group in groupby(samples, key=lambda sample: sample.group_index)
            for number, (better, worse) in enumerate(self.pairs(list(group)))
        ]
        with (self._folder / FILE).open("a", encoding="utf-8") as file:
            file.writelines(json.dumps(row) + "\n" for row in rows)

    def pairs(self, group: Sequence[Sample]) -> Iterator[tuple[Sample, Sample]]:
        """Yield (better, worse) of a group: best with worst, second best with second worst …"""
        ranked = sorted((s for s in group if s.reward is not None and s.media), key=_reward)
        for place in range(min(self.options.pairs_per_group, len(ranked) // 2)):
            better, worse = ranked[-1 - place], ranked[place]
            if _reward(better) - _reward(worse) > self.options.min_gap:
                yield better, worse

    def close(self) -> None:
        """Do nothing: every row is on the disk already."""

    def _write(self, step: int, name: str, better: Sample, worse: Sample) -> dict[str, Any]:
        assert self._folder is not None
        files = {CHOSEN: f"{name}-chosen.png", REJECTED: f"{name}-rejected.png"}
        for sample, file in zip((better, worse), files.values(), strict=True):
            assert sample.media is not None  # ``pairs`` takes none without
            write_picture(sample.media, self._folder / file)
        rewards = {f"{CHOSEN}_reward": better.reward, f"{REJECTED}_reward": worse.reward}
        return {"step": step, "input": better.prompt.text, **files, **rewards}


def _reward(sample: Sample) -> float:
    assert sample.reward is not None
    return sample.reward

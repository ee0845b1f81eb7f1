"""Samples with pictures, a finished run directory, and a strict reader of the report."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
import torch

from drl.interfaces.updater import PushReport
from drl.observe.directory import RunDirectory
from drl.observe.files import append_json_line, write_json_atomic, write_text_atomic
from drl.observe.pictures import save_samples
from drl.observe.report import write_report
from drl.observe.summary import (
    Summary,
    compare,
    parity_summary,
    record_push,
    sync_totals,
    write_summary,
)
from drl.observe.versions import versions
from drl.types import Media, ParityReport, Prompt, Sample

Make = Callable[..., Sample]
SAMPLER = "euler ODE, 8 steps, guidance 1, 48x16, seeds 42..43"
VOID = {"meta", "img", "input", "br"}


@pytest.fixture(scope="session")
def make_sample() -> Callable[..., Sample]:
    def make(
        row: int = 0,
        text: str = 'sign "WIND"',
        *,
        seed: int = 42,
        reward: float | None = 0.5,
        pixels: torch.Tensor | None = None,
        member: int = 0,
    ) -> Sample:
        shown = torch.full((3, 1, 16, 48), 0.25) if pixels is None else pixels
        return Sample(
            index=row * 10 + member,
            group_index=row,
            member=member,
            prompt=Prompt(row=row, text=text),
            seed=seed,
            reward=reward,
            media=Media(pixels=shown),
        )

    return make


class Page(HTMLParser):
    """A strict reader: every tag is closed in order; keeps tags with attributes, and text."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.words: list[str] = []
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if not self.open or self.open[-1] != "style":
            self.words.append(data)

    @property
    def text(self) -> str:
        return " ".join(" ".join(self.words).split())

    def named(self, tag: str) -> list[dict[str, str | None]]:
        return [attributes for name, attributes in self.tags if name == tag]


def make_row(step: int, **changed: float) -> dict[str, Any]:
    row: dict[str, Any] = {
        "step": step,
        "time": 1e9 + step,
        "rollout/reward/raw_mean": 0.5 + 0.01 * step,
        "rollout/reward/raw_std": 0.25,
        "rollout/reward/raw_num_samples": 64,
        "train/ratio_abs_minus_1": 1e-4,
        "train/clipfrac": 0.01,
        "train/loss": -0.001,
        "train/grad_norm": 0.5,
        "perf/rollout_time": 2.0,
        "perf/train_time": 1.0,
        "perf/unaccounted_time": 0.1,
        "perf/step_time": 3.1,
    }
    return row | changed


def evaluation(make: Make, level: float, text: str = "sign") -> list[Sample]:
    generator = torch.Generator().manual_seed(0)
    return [
        make(
            row=row,
            text=f"{text} {row}",
            seed=42 + place,
            member=place,
            reward=level,
            pixels=torch.rand(3, 1, 16, 48, generator=generator),
        )
        for row in range(20)
        for place in range(2)
    ]


def fill_run(run: RunDirectory, make: Make, text: str = "sign") -> None:
    """Write what a finished run of five iterations leaves behind."""
    before, after = evaluation(make, 0.25, text), evaluation(make, 0.75, text)
    write_text_atomic(run.recipe, '[run]\nname = "glyphs"\n\n[trust]\nmax_log_prob_diff = 1e-5\n')
    components = [
        {"kind": "reward", "name": "ocr", "distribution": "drl-reward-ocr", "version": "1"}
    ]
    write_json_atomic(run.plugins, versions([("drl-reward-ocr", "1")], components))
    for step in range(5):
        extra = {"eval/heldout": 0.3 + 0.1 * step, "perf/eval_time": 0.5} if step in (0, 4) else {}
        append_json_line(run.metrics, make_row(step, **extra))
    for version in range(5):
        record_push(run, make_push(version), "checksum equal")
    save_samples(run.samples / "before", before, rows=20)
    save_samples(run.samples / "after", after, rows=20)
    save_samples(run.samples / "step_0000004", after[:6], rows=2)
    summary = Summary(
        heldout=compare(before, after, sampler=SAMPLER),
        heldout_rollout_sampler=compare(before, before, sampler="cps noise 0.7, 8 steps"),
        train_seconds=125.0,
        seed=7,
        iterations=5,
        images_seen=320,
        parity=parity_summary(ParityReport(by_step={0: 0.0, 1: 2e-5}, rows=64), limit=1e-5),
        sync=sync_totals(run),
        unproven=("guidance_scale",),
    )
    write_summary(run, summary)


def make_push(version: int, missing: tuple[str, ...] = ()) -> PushReport:
    return PushReport(
        version=version,
        component="transformer",
        names=("a", "b", "c"),
        buckets=1,
        bytes=9_500_000,
        checksum=f"{version:02x}" * 32,
        missing=missing,
        seconds=0.25,
    )


@pytest.fixture(scope="session")
def finished(tmp_path_factory: pytest.TempPathFactory, make_sample: Make) -> RunDirectory:
    """A finished run that tests copy before they change it."""
    run = RunDirectory.create(tmp_path_factory.mktemp("runs"), "glyphs", now=1e9)
    fill_run(run, make_sample)
    return run


@pytest.fixture
def run(finished: RunDirectory, tmp_path: Path) -> RunDirectory:
    return RunDirectory(Path(shutil.copytree(finished.path, tmp_path / "glyphs-run")))


@pytest.fixture
def fill(make_sample: Make) -> Callable[..., None]:
    return lambda run, text: fill_run(run, make_sample, text)


@pytest.fixture
def row_of() -> Callable[..., dict[str, Any]]:
    return make_row


@pytest.fixture
def push() -> Callable[..., PushReport]:
    return make_push


@pytest.fixture
def read_page() -> Callable[[Path], Page]:
    return lambda path: Page(path.read_text(encoding="utf-8"))


@pytest.fixture
def page_of() -> Callable[[RunDirectory], Page]:
    """Write the report of a run and read it."""
    return lambda run: Page(write_report(run.path).read_text(encoding="utf-8"))

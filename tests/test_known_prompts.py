"""What an engine is told of the texts that will come, in a run that is built and not started."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from e2e import metric_rows, run_here, write_recipe
from gpu.runs import open_run, roll_out

from drl.assemble import assemble, known_texts, launch_of
from drl.catalog import Catalog
from drl.cluster.background import Background
from drl.config import load_recipe
from drl.observe.directory import RunDirectory

Build = Callable[..., Any]


@pytest.fixture
def recipe(tmp_path: Path, checkpoint: Path) -> Path:
    path = write_recipe(tmp_path, checkpoint)
    rows = [{"input": text} for text in ("a sign", "two signs", "a sign")]
    (tmp_path / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "other.jsonl").write_text('{"input": "two signs"}\n{"input": "held out"}\n')
    return path


@pytest.fixture
def build(recipe: Path, tmp_path: Path) -> Build:
    def built(*sets: str) -> Any:
        background = Background()
        loaded: Any = load_recipe(recipe, sets=sets, catalog=Catalog.load())
        try:
            with RunDirectory.create_at(tmp_path / "built") as directory:
                return assemble(loaded, loaded.catalog, directory, background)
        finally:
            background.close()

    return built


def judged(recipe: Path) -> str:
    return f'eval.datasets=[{{name="other",path="{recipe.with_name("other.jsonl")}"}}]'


def test_an_engine_is_told_every_text_once(build: Build, recipe: Path) -> None:
    run = build(judged(recipe))
    assert launch_of(run).prompts == ("a sign", "two signs", "held out")
    assert known_texts(run) == launch_of(run).prompts


def test_the_negative_prompt_belongs_to_them(build: Build) -> None:
    run = build("sampling.negative_prompt=blurred", "sampling.guidance_scale=4.5")
    assert launch_of(run).prompts == ("a sign", "two signs", "blurred")


def test_the_engine_encodes_them_at_its_start_and_lets_the_encoders_go(
    recipe: Path, tmp_path: Path
) -> None:
    sets = (judged(recipe), "model.sd3.text_encoders=released", "sampling.negative_prompt=blurred")
    with open_run(recipe, tmp_path / "run", *sets) as run:
        text = run.engines.engine.sampler.pipeline.text
        assert list(text.stored) == ["a sign", "two signs", "held out", "blurred", " "]
        assert text.encoders.clips[0].encoder.module is None
        roll_out(run)
        assert (
            text.encoders.clips[0].encoder.module is None
        )  # " " is the engine's own negative prompt


def test_released_encoders_change_nothing_but_where_embeddings_wait(
    recipe: Path, tmp_path: Path
) -> None:
    short = (judged(recipe), "train.num_rollout=1")
    rows = []
    for name in ("resident", "released"):
        run_here(recipe, tmp_path / name, *short, f"model.sd3.text_encoders={name}")
        rows.append(metric_rows(tmp_path / name))
    assert rows[0] == rows[1]

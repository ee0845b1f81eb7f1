"""Encoder processes: rows are handed out a few at a time, and workers build what the driver has."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from encoding_runs import image_rows

from drl.catalog import Catalog
from drl.cluster import encoders
from drl.cluster.encoders import EncoderSpec, InlineEncoders, encoder_of, hand_out
from drl.config import load_recipe
from drl.errors import BadInput
from drl.stages.records import Outcome, build_encoder, outcome_of
from drl.trainers import Maker
from drl.types import Context, MediaFile, Prompt
from drl_family_sd3.tiny import build_random

RECIPE = """
[model]
checkpoint = "tiny-sd3"
[data]
prompt_data = "data.jsonl"
sft_frame_stride = 1
[sampling]
width = 32
height = 32
[rollout]
batch_size = 3
[algorithm]
loss = "sft_loss"
[train]
train_only = true
num_rollout = 3
[cluster]
device = "cpu"
"""


@pytest.fixture
def recipe(tmp_path: Path) -> Any:
    build_random(tmp_path / "tiny-sd3", seed=0)
    image_rows(tmp_path, 2)
    (tmp_path / "recipe.toml").write_text(RECIPE)
    return load_recipe(tmp_path / "recipe.toml", catalog=Catalog.load())


class Drawn:
    """Prompts that count how many were asked for."""

    def __init__(self, total: int) -> None:
        self.total = total
        self.count = 0

    def __iter__(self) -> Iterator[Prompt]:
        for row in range(self.total):
            self.count += 1
            yield Prompt(row=row, text=f"{row}")


def test_no_more_rows_are_drawn_than_workers_can_soon_take() -> None:
    prompts, free = Drawn(100), threading.Semaphore(0)

    def work(prompt: Prompt) -> Outcome:
        free.acquire()
        return Outcome(prompt.row)

    with ThreadPoolExecutor(1) as executor:
        results = hand_out(executor, work, iter(prompts), 4)
        assert next(results) == Outcome()  # nothing was done, the caller may look around
        assert prompts.count == 4
        free.release(1)
        done = next(outcome for outcome in results if outcome.row is not None)
        assert done.row == 0
        assert prompts.count <= 5
        free.release(99)
        rest = [outcome.row for outcome in results if outcome.row is not None]
    assert sorted(rest) == list(range(1, 100))


def test_what_a_worker_raises_reaches_the_caller() -> None:
    def work(prompt: Prompt) -> Outcome:
        raise BadInput("no text encoder")

    with ThreadPoolExecutor(1) as executor:
        results = hand_out(executor, work, iter(Drawn(3)), 2)
        with pytest.raises(BadInput, match="no text encoder"):
            list(results)


def test_a_worker_builds_the_encoder_of_the_driver(recipe: Any, tmp_path: Path) -> None:
    catalog, context = Catalog.load(), Context(device="cpu", seed=recipe.train.seed)
    family = Maker(recipe, catalog, context)("family", recipe.model.family, "model")
    ours = build_encoder(recipe, family, context, catalog)
    spec = EncoderSpec(text=recipe.to_toml(), source="recipe.toml", context=context)
    theirs = encoder_of(spec)
    assert (theirs.facts, theirs.target, theirs.chosen) == (ours.facts, ours.target, ours.chosen)
    media = MediaFile(root=tmp_path, name="media/0.png")
    prompt = Prompt(row=1, text="picture 0", media=media)
    ours.files(tmp_path).prepare()
    assert outcome_of(theirs, prompt) == Outcome(1)
    assert ours.has(prompt)
    broken = Prompt(row=2, text="b", media=MediaFile(root=tmp_path, name="data.jsonl"))
    assert outcome_of(theirs, broken) == Outcome(
        2, "data.jsonl: is no image (.bmp, .jpeg, .jpg, .png, .webp)"
    )


def test_workers_take_the_devices_of_the_trainer_in_turn(
    recipe: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[tuple[EncoderSpec, tuple[str, ...]]] = []

    def note(prompts: object, spec: EncoderSpec, devices: tuple[str, ...]) -> Iterator[Outcome]:
        asked.append((spec, devices))
        return iter(())

    monkeypatch.setattr(encoders, "encode_in_workers", note)
    inline = InlineEncoders(recipe, Catalog.load(), Context())
    assert list(inline.encode([], 3)) == []
    ((spec, devices),) = asked
    assert devices == ("cpu", "cpu", "cpu")
    assert (spec.source, spec.off) == ("recipe.toml", ())
    assert "tiny-sd3" in spec.text

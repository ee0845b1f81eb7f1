"""Records of supervised training: encoded once, the same in any order, fitted to the recipe's size."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Generator, Tensor

from drl.errors import DataError
from drl.interfaces.family import Pipeline
from drl.media.fit import fitted
from drl.observe.timing import Phases
from drl.stages.encode import clean_latents, collect_records
from drl.stages.records import Records
from drl.types import ConditionRecord, Context, Media, Prompt, Sampling, Streams, rejected


class Averaging(Pipeline):
    """Latents are the mean of each 2 x 2 block plus noise; text is its length."""

    def __init__(self) -> None:
        self.encoded: list[tuple[int, ...]] = []
        self.texts: list[str] = []

    def encode_text(self, prompts: Sequence[str]) -> list[ConditionRecord]:
        self.texts.extend(prompts)
        return [
            ConditionRecord(tensors={"text": torch.tensor([float(len(text))])}) for text in prompts
        ]

    def encode_media(self, media: Media, generator: Generator) -> Streams:
        self.encoded.append(tuple(media.pixels.shape))
        mean = torch.nn.functional.avg_pool2d(media.pixels[:, 0], 2)
        return {"visual": mean + 0.1 * torch.randn(mean.shape, generator=generator)}

    def sigmas(self, sampling: Sampling) -> Tensor:
        raise NotImplementedError

    def timesteps(self, sampling: Sampling) -> Tensor:
        raise NotImplementedError

    def initial(self, sampling: Sampling, generator: Generator) -> Streams:
        raise NotImplementedError

    def decode(self, streams: Streams) -> list[Media]:
        raise NotImplementedError


def picture(row: int, *, media: bool = True, epoch: int = 0) -> Prompt:
    pixels = torch.full((3, 1, 4, 4), row / 10)
    return Prompt(
        row=row, text=f"picture {row}", epoch=epoch, media=Media(pixels=pixels) if media else None
    )


class Listed:
    """Gives these prompts once, one after the other."""

    def __init__(self, prompts: Sequence[Prompt]) -> None:
        self.prompts = list(prompts)
        self.place = 0

    def take(self, count: int) -> list[Prompt]:
        self.place += count
        return self.prompts[self.place - count : self.place]

    def rows(self) -> None:
        return None

    def state(self) -> dict[str, int]:
        return {"place": self.place}

    def restore(self, state: dict[str, int]) -> None:
        self.place = state["place"]


def run_of(prompts: Sequence[Prompt], *, batch: int = 2, seed: int = 0, side: int = 4) -> Any:
    """What encoding needs of a run: its source gives these prompts."""
    return SimpleNamespace(
        phases=Phases(),
        source=Listed(prompts),
        recipe=SimpleNamespace(
            rollout=SimpleNamespace(batch_size=batch),
            data=SimpleNamespace(source="glyphs"),
            sampling=SimpleNamespace(height=side, width=side),
            train=SimpleNamespace(num_rollout=10),
        ),
        counters=SimpleNamespace(next_group=5, images_seen=100),
        first_rollout=0,
        version=3,
        pipeline=Averaging(),
        records=Records(),
        row={},
        context=Context(seed=seed),
    )


def test_every_row_is_a_group_of_one_record_with_the_next_number() -> None:
    run = run_of([picture(row) for row in range(4)])
    first, second = collect_records(run, 7), collect_records(run, 8)
    assert (first.rollout_id, second.rollout_id, first.version) == (7, 8, 3)
    assert [group.group_index for group in (*first.groups, *second.groups)] == [5, 6, 7, 8]
    for group in (*first.groups, *second.groups):
        (sample,) = group.samples
        assert (sample.index, sample.member) == (group.group_index, 0)
        assert sample.condition is not None
        assert sample.condition.tensors["text"].tolist() == [len(group.prompt.text)]
    assert (run.counters.next_group, run.counters.images_seen) == (9, 104)
    assert "perf/encode_time" in run.phases.finish()


def test_a_row_that_comes_again_is_not_encoded_again() -> None:
    run = run_of([picture(1), picture(2), picture(2, epoch=1), picture(1, epoch=1)])
    first, second = collect_records(run, 0), collect_records(run, 1)
    assert len(run.pipeline.encoded) == 2
    assert second.groups[1].samples[0].clean is first.groups[0].samples[0].clean
    assert second.groups[0].samples[0].clean is first.groups[1].samples[0].clean


def test_the_noise_of_the_encoder_is_that_of_the_row_whatever_came_before() -> None:
    alone = clean_latents(run_of([]), picture(3))["visual"]
    run = run_of([])
    for row in (9, 1):
        clean_latents(run, picture(row))
    assert torch.equal(clean_latents(run, picture(3))["visual"], alone)
    other_seed = clean_latents(run_of([], seed=1), picture(3))["visual"]
    other_row = clean_latents(run_of([]), picture(4))["visual"]
    assert not torch.equal(other_seed, alone)
    assert not torch.equal(other_row - other_row.mean(), alone - alone.mean())


def test_a_row_without_picture_is_named_with_its_source() -> None:
    rows = [picture(5), picture(6, media=False)]
    with pytest.raises(DataError, match=r"data\.source = 'glyphs': row 6 has no picture; super"):
        collect_records(run_of(rows), 0)


def test_what_encoding_cost_stands_among_the_figures() -> None:
    run = run_of([picture(1), picture(2), picture(2, epoch=1), picture(3, epoch=1)])
    collect_records(run, 0)
    assert run.row["rollout/sft_cache_miss"] == 2
    assert (run.row["rollout/sft_epoch"], run.row["rollout/sft_broken_rows"]) == (0, 0)
    collect_records(run, 1)
    assert run.row["rollout/sft_cache_miss"] == 1
    assert run.row["rollout/sft_epoch"] == 1
    assert 0 < run.row["rollout/sft_encode_seconds"] < 60


def test_the_worse_picture_of_a_preference_stands_beside_the_better_one() -> None:
    better = picture(4)
    preference = Prompt(row=4, text="b", media=better.media, rejected=picture(8).media)
    found = clean_latents(run_of([]), preference)
    assert list(found) == ["visual", rejected("visual")]
    assert torch.equal(found["visual"], clean_latents(run_of([]), better)["visual"])
    apart = found[rejected("visual")] - found["visual"]
    assert torch.allclose(apart, torch.full_like(apart, 0.4), atol=1e-6)  # the noise is the same


def test_pictures_are_encoded_at_the_size_of_the_recipe() -> None:
    run = run_of([], side=8)
    assert clean_latents(run, picture(1))["visual"].shape == (3, 4, 4)
    assert run.pipeline.encoded == [(3, 1, 8, 8)]


sides = st.integers(1, 40)


@settings(max_examples=60, deadline=None)
@given(tall=sides, wide=sides, height=sides, width=sides, frames=st.integers(1, 3))
def test_fitting_keeps_a_plain_picture_plain_and_every_frame(
    tall: int, wide: int, height: int, width: int, frames: int
) -> None:
    levels = torch.linspace(0.2, 0.8, frames).reshape(1, frames, 1, 1)
    media = Media(pixels=levels.expand(3, frames, tall, wide).clone(), kind="video", fps=8.0)
    result = fitted(media, height, width)
    assert result.pixels.shape == (3, frames, height, width)
    assert torch.allclose(result.pixels, levels.expand(3, frames, height, width), atol=1e-5)
    assert (result.kind, result.fps) == ("video", 8.0)
    assert result.pixels.is_contiguous()


@pytest.mark.parametrize(("tall", "wide"), [(8, 16), (16, 8)])
def test_what_sticks_out_is_cut_off_evenly_on_both_sides(tall: int, wide: int) -> None:
    pixels = torch.zeros(1, 1, tall, wide)
    middle = (
        (slice(tall // 4, -(tall // 4)), slice(None))
        if tall > wide
        else (
            slice(None),
            slice(wide // 4, -(wide // 4)),
        )
    )
    pixels[0, 0, middle[0], middle[1]] = 1.0
    result = fitted(Media(pixels=pixels), 8, 8).pixels
    assert result.min() == 1.0


@pytest.mark.parametrize("wide", [False, True])
def test_the_longer_side_is_scaled_like_the_shorter_one(wide: bool) -> None:
    pixels = torch.zeros(1, 1, 10, 4)
    pixels[0, 0, 2:8] = 1.0  # what remains of 20 lines is 6 to 13: lines 3 to 6 and a margin
    media = Media(pixels=pixels.transpose(2, 3) if wide else pixels)
    assert fitted(media, 8, 8).pixels.min() == 1.0


def test_shrinking_takes_every_pixel_into_account() -> None:
    stripes = torch.tensor([1.0, 0.0, 0.0, 1.0]).repeat(8).expand(1, 1, 32, 32)
    small = fitted(Media(pixels=stripes.contiguous()), 8, 8).pixels
    assert small[..., 2:6].mean() == pytest.approx(0.5, abs=0.02)


def test_what_the_filter_overshoots_is_clipped_to_the_range_of_pixels() -> None:
    generator = torch.Generator().manual_seed(0)
    edges = (torch.rand(3, 1, 9, 7, generator=generator) > 0.5).float()
    for size in ((18, 14), (4, 3), (5, 20)):
        result = fitted(Media(pixels=edges), *size).pixels
        assert 0.0 <= result.min() <= result.max() <= 1.0

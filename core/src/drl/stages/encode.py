"""Records for supervised training: rows of the data source, encoded once and kept in memory."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from drl.errors import DataError
from drl.types import Group, Media, Prompt, Rollout, Sample

if TYPE_CHECKING:
    from drl.run import Run
    from drl.types import Streams


def collect_records(run: Run, rollout_id: int) -> Rollout:
    """Return one group of one record per drawn row, encoded."""
    with run.phases.phase("encode"):
        prompts = run.source.take(run.recipe.rollout.batch_size)
        groups = [_record(run, prompt) for prompt in prompts]
    run.counters.images_seen += len(groups)
    return Rollout(rollout_id=rollout_id, version=run.version, groups=groups)


def _record(run: Run, prompt: Prompt) -> Group:
    number = run.counters.next_group
    run.counters.next_group += 1
    assert run.pipeline is not None
    (condition,) = run.pipeline.encode_text([prompt.text])
    sample = Sample(
        index=number,
        group_index=number,
        member=0,
        prompt=prompt,
        seed=0,
        clean=clean_latents(run, prompt),
        condition=condition,
    )
    return Group(group_index=number, prompt=prompt, samples=[sample])


def clean_latents(run: Run, prompt: Prompt) -> Streams:
    """Encode a row's media the first time it is drawn; the noise of the encoder depends on the row alone."""
    known = run.encoded.get(prompt.row)
    if known is not None:
        return known
    if prompt.media is None:
        raise DataError(
            f"data.source = '{run.recipe.data.source}': row {prompt.row} has no picture; supervised training "
            "needs a source with media"
        )
    assert run.pipeline is not None
    sampling = run.recipe.sampling
    media = fitted(prompt.media, sampling.height, sampling.width)
    generator = run.context.generator("encode_media", prompt.row)
    latents = run.pipeline.encode_media(media, generator)
    run.encoded[prompt.row] = latents
    return latents


def fitted(media: Media, height: int, width: int) -> Media:
    """Scale to cover ``height`` x ``width`` (bilinear, antialiased) and crop the centre."""
    tall, wide = media.pixels.shape[2:]
    if (tall, wide) == (height, width):
        return media
    scale = max(height / tall, width / wide)
    size = (max(height, round(tall * scale)), max(width, round(wide * scale)))
    frames_first = media.pixels.transpose(0, 1)
    scaled = torch.nn.functional.interpolate(
        frames_first, size=size, mode="bilinear", antialias=True
    )
    top, left = (size[0] - height) // 2, (size[1] - width) // 2
    cropped = scaled[:, :, top : top + height, left : left + width].clamp(0, 1)
    return replace(media, pixels=cropped.transpose(0, 1).contiguous())

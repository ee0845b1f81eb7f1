"""Records for supervised training: rows of the data source with the latents of their media.

Files are encoded before the first iteration, as far as the run will draw them, and come from the cache
afterwards (``stages/ahead.py``). Pictures that a source makes itself are encoded when they are first
drawn, and kept in memory.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from drl.errors import DataError
from drl.media.broken import BrokenMedia
from drl.media.fit import fitted
from drl.stages.ahead import encode_ahead, encoder_for, refuses
from drl.stages.records import Record, media_files
from drl.types import Group, Media, MediaFile, Prompt, Rollout, Sample, rejected

if TYPE_CHECKING:
    from drl.run import Run
    from drl.types import Streams

BARREN = 1000
"""Draws without a usable row after which a source of no known length is given up."""


def collect_records(run: Run, rollout_id: int) -> Rollout:
    """Return one group of one record per drawn row, encoded, and put what that cost into the row of figures."""
    begun = time.monotonic()
    with run.phases.phase("encode"):
        missed = encode_ahead(run)
        groups: list[Group] = []
        barren = 0
        while len(groups) < run.recipe.rollout.batch_size:
            for prompt in run.source.take(run.recipe.rollout.batch_size - len(groups)):
                found, new = usable_record(run, prompt)
                missed += new
                barren = 0 if found is not None else barren + 1
                if found is not None:
                    groups.append(_group(run, prompt, found))
            if barren > (run.source.rows() or BARREN):
                raise DataError(
                    f"data.source = '{run.recipe.data.source}': no row can be used; "
                    f"the last reason: {next(reversed(run.records.broken.values()))}"
                )
    run.counters.images_seen += len(groups)
    run.row["rollout/sft_cache_miss"] = float(missed)
    run.row["rollout/sft_encode_seconds"] = time.monotonic() - begun
    run.row["rollout/sft_epoch"] = float(max(group.prompt.epoch for group in groups))
    run.row["rollout/sft_broken_rows"] = float(len(run.records.broken))
    return Rollout(rollout_id=rollout_id, version=run.version, groups=groups)


def _group(run: Run, prompt: Prompt, record: Record) -> Group:
    number = run.counters.next_group
    run.counters.next_group += 1
    sample = Sample(
        index=number,
        group_index=number,
        member=0,
        prompt=prompt,
        seed=0,
        clean=record.clean,
        condition=record.condition,
    )
    return Group(group_index=number, prompt=prompt, samples=[sample])


def usable_record(run: Run, prompt: Prompt) -> tuple[Record | None, bool]:
    """Return the record of a row and whether it had to be encoded; None for one that the recipe skips."""
    if prompt.row in run.records.broken:
        return None, False
    if not media_files(prompt):
        return generated_record(run, prompt)
    encoder = encoder_for(run)
    try:
        record = encoder.read(prompt)
        if record is not None:
            return record, False
        encoder.files(media_files(prompt)[0].root).prepare()
        encoder.encode(prompt)
        return encoder.read(prompt), True
    except BrokenMedia as error:
        if refuses(run):
            raise DataError(f"row {prompt.row}: {error}") from error
        run.records.broken[prompt.row] = str(error)
        run.event(f"row {prompt.row} is skipped: {error}")
        return None, False


def generated_record(run: Run, prompt: Prompt) -> tuple[Record, bool]:
    """Return the record of a row whose media the source made, and whether they had to be encoded."""
    new = prompt.row not in run.records.kept
    clean = clean_latents(run, prompt)
    assert run.pipeline is not None
    (condition,) = run.pipeline.encode_text([prompt.text])
    return Record(clean=clean, condition=condition), new


def clean_latents(run: Run, prompt: Prompt) -> Streams:
    """Encode a row's media the first time it is drawn; the noise of the encoder depends on the row alone.

    The worse item of a preference stands under ``rejected(stream)``, encoded with the same noise.
    """
    known = run.records.kept.get(prompt.row)
    if known is not None:
        return known
    clean = dict(_encoded(run, prompt, prompt.media))
    if prompt.rejected is not None:
        worse = _encoded(run, prompt, prompt.rejected)
        clean |= {rejected(stream): latents for stream, latents in worse.items()}
    run.records.kept[prompt.row] = clean
    return clean


def _encoded(run: Run, prompt: Prompt, media: Media | MediaFile | None) -> Streams:
    if not isinstance(media, Media):
        raise DataError(
            f"data.source = '{run.recipe.data.source}': row {prompt.row} has no picture; supervised training "
            "needs a source with media"
        )
    assert run.pipeline is not None
    sampling = run.recipe.sampling
    generator = run.context.generator("encode_media", prompt.row)
    return run.pipeline.encode_media(fitted(media, sampling.height, sampling.width), generator)

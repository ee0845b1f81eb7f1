"""Before the first iteration: look at every row that a run will draw, and encode those not in the cache.

So what is wrong with the data is told at once, training never waits for an encoder, and processes that
encode are gone before it begins.
"""

from __future__ import annotations

import time
from collections.abc import Generator, Iterable, Iterator
from contextlib import closing
from dataclasses import dataclass
from typing import TYPE_CHECKING

from drl.errors import DataError, Interrupted
from drl.media.broken import BrokenMedia
from drl.media.reading import check_media
from drl.stages.records import Outcome, RecordEncoder, build_encoder, media_files, outcome_of
from drl.types import MediaFile

if TYPE_CHECKING:
    from drl.interfaces.data import DataSource
    from drl.run import Run
    from drl.types import Prompt

CHUNK = 8
"""Rows drawn at once: those of some sources hold the bytes of their media."""

SHOWN = 20
"""How many broken rows a message lists; the rest is counted."""

REPORT_S = 20.0
"""Seconds between two lines about how far the encoding is."""


def encode_ahead(run: Run) -> int:
    """Check and encode what the run will draw, once; return how many rows the cache lacked.

    DataError lists the rows that cannot be used, unless the recipe skips them. Interrupted when the user
    asked the run to end; what is encoded by then is kept.
    """
    if run.records.looked_ahead:
        return 0
    run.records.looked_ahead = True
    left = (run.recipe.train.num_rollout - run.first_rollout) * run.recipe.rollout.batch_size
    if not first_is_a_file(run.source, left):
        return 0
    encoder = encoder_for(run)
    with closing(coming(run.source, left)) as prompts:
        missing = look_at(run, encoder, prompts, min(left, run.source.rows() or left))
    settle_broken(run)
    told = len(run.records.broken)
    if not missing:
        return 0
    with closing(coming(run.source, left)) as prompts:
        encode_rows(run, encoder, prompts, missing)
    encoder.release()
    if len(run.records.broken) > told:
        settle_broken(run)
    return len(missing)


def encoder_for(run: Run) -> RecordEncoder:
    """Return the encoder of a run, built when it is first needed."""
    if run.records.encoder is None:
        run.records.encoder = build_encoder(run.recipe, run.family, run.context, run.catalog)
    return run.records.encoder


def refuses(run: Run) -> bool:
    """True when a broken row ends the run."""
    return bool(run.recipe.data.on_broken_row == "refuse")


def first_is_a_file(source: DataSource, left: int) -> bool:
    """True for a source of media files: its rows are cheap to draw, and worth encoding ahead."""
    with closing(coming(source, min(left, 1))) as prompts:
        return any(media_files(prompt) or prompt.media is None for prompt in prompts)


def coming(source: DataSource, count: int) -> Generator[Prompt, None, None]:
    """Yield the different rows among the next ``count`` draws; afterwards the source is where it was."""
    state, rows = source.state(), source.rows()
    seen: set[int] = set()
    try:
        for begin in range(0, count, CHUNK):
            for prompt in source.take(min(CHUNK, count - begin)):
                if prompt.row not in seen:
                    seen.add(prompt.row)
                    yield prompt
            if rows is not None and len(seen) >= rows:
                return
    finally:
        source.restore(state)


def look_at(
    run: Run, encoder: RecordEncoder, prompts: Iterable[Prompt], total: int
) -> dict[int, None]:
    """Return the rows that must be encoded, in order; what shows to be broken is noted in ``run.records``."""
    missing: dict[int, None] = {}
    for done, prompt in enumerate(prompts, start=1):
        run.progress("check data", done, total)
        stop_if_asked(run, f"while data were checked: {done} of {total} rows")
        try:
            if needs_encoding(run, encoder, prompt):
                missing[prompt.row] = None
        except BrokenMedia as error:
            run.records.broken[prompt.row] = str(error)
    return missing


def needs_encoding(run: Run, encoder: RecordEncoder, prompt: Prompt) -> bool:
    """True when the cache lacks a row that can be encoded as far as its head tells; else BrokenMedia."""
    if not isinstance(prompt.media, MediaFile):
        key = run.recipe.data.metadata_key
        raise BrokenMedia(f"names no media: give {key}.image or {key}.video, one of them")
    if encoder.has(prompt):
        return False
    for file in media_files(prompt):
        check_media(file, encoder.target)
    return True


def settle_broken(run: Run) -> None:
    """Raise DataError with the broken rows, or say which are left out."""
    broken = run.records.broken
    if not broken:
        return
    listed = [f"  row {row}: {why}" for row, why in sorted(broken.items())[:SHOWN]]
    if len(broken) > SHOWN:
        listed.append(f"  … and {len(broken) - SHOWN} more")
    rows = f"{len(broken)} row{'s' if len(broken) != 1 else ''}"
    if refuses(run):
        head = f"data.source = '{run.recipe.data.source}': {rows} cannot be used"
        way = "correct them, or leave them out with data.on_broken_row = 'skip'"
        raise DataError("\n".join([head, *listed, way]))
    run.event("\n".join([f"{rows} cannot be used and are left out", *listed]))


def encode_rows(
    run: Run, encoder: RecordEncoder, prompts: Iterable[Prompt], missing: dict[int, None]
) -> None:
    """Encode rows here or in workers; what turns out to be broken is noted in ``run.records``."""
    wanted = prepared(encoder, (prompt for prompt in prompts if prompt.row in missing))
    progress = Progress(len(missing))
    with closing(outcomes(run, encoder, wanted, len(missing))) as results:
        for outcome in results:
            if outcome.row is not None:
                progress.count(time.monotonic())
                run.progress("encode", progress.done, progress.total)
            if outcome.row is not None and outcome.broken is not None:
                run.records.broken[outcome.row] = outcome.broken
            line = progress.line(time.monotonic())
            if line is not None:
                run.event(line)
            if progress.done < progress.total:
                stop_if_asked(
                    run,
                    f"while data were encoded: {progress.done} of {progress.total} rows are done and kept",
                )


def stop_if_asked(run: Run, where: str) -> None:
    """Raise Interrupted when the user asked the run to end: no iteration has begun that could be finished."""
    if run.stop.asked:
        raise Interrupted(
            f"stopped by {run.stop.reason} {where}\nstart the run again to go on from there"
        )


def prepared(encoder: RecordEncoder, prompts: Iterable[Prompt]) -> Iterator[Prompt]:
    """Make the folder of the cache before the first row of a data set is encoded."""
    ready = set()
    for prompt in prompts:
        root = media_files(prompt)[0].root
        if root not in ready:
            encoder.files(root).prepare()
            ready.add(root)
        yield prompt


def outcomes(
    run: Run, encoder: RecordEncoder, prompts: Iterable[Prompt], total: int
) -> Generator[Outcome, None, None]:
    """Encode rows one after the other in this process, or in as many workers as the recipe says."""
    workers = min(run.recipe.data.sft_workers, total)
    if workers == 0:
        for prompt in prompts:
            yield outcome_of(encoder, prompt)
        return
    assert run.encoders is not None
    yield from run.encoders.encode(prompts, workers)


@dataclass(slots=True)
class Progress:
    """How far the encoding is. Times are seconds of a monotonic clock; ``first`` is the end of the first row."""

    total: int
    done: int = 0
    first: float = 0.0
    told: float = 0.0

    def count(self, now: float) -> None:
        """Note one more row; processes take a while to start, so the clock runs from the first."""
        self.done += 1
        if self.done == 1:
            self.first = self.told = now

    def line(self, now: float) -> str | None:
        """Return a line about what is done and the time that is left; None when the last one is recent."""
        if self.done < 2 or now - self.told < REPORT_S:
            return None
        self.told = now
        left = (now - self.first) / (self.done - 1) * (self.total - self.done)
        return f"encoded {self.done} of {self.total} rows, about {left:.0f} s left"

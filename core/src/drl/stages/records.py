"""``RecordEncoder``: a row of media and text to latents and condition, read from the cache where it is there.

A file's latents depend on its content, the recipe's size and the encoders, and on nothing else: neither
on the row, the run's seed, nor on which process encodes them (rl-post-training reference 5.3).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING, Any

from drl.errors import BadInput
from drl.media.broken import BrokenMedia
from drl.media.cache import FOLDER, EncodedFiles, canonical
from drl.media.fit import Target
from drl.media.reading import content_digest, read_media, version_of
from drl.types import ConditionRecord, MediaFile, rejected

if TYPE_CHECKING:
    from drl.catalog import Catalog
    from drl.interfaces.family import Family, Pipeline
    from drl.types import Context, Prompt, Streams


@dataclass(frozen=True, slots=True, kw_only=True)
class Record:
    """One encoded row: clean latents per stream ``(*L)``, of a preference also the worse one's; its condition."""

    clean: Streams
    condition: ConditionRecord


@dataclass(slots=True)
class Records:
    """What a supervised run knows of its rows.

    ``kept``: latents of generated pictures by row. ``broken``: why a row cannot be used. ``encoder`` is
    there once it was needed; ``looked_ahead`` says that the coming rows were encoded.
    """

    kept: dict[int, Streams] = field(default_factory=dict)
    broken: dict[int, str] = field(default_factory=dict)
    encoder: RecordEncoder | None = None
    looked_ahead: bool = False


@dataclass(slots=True, kw_only=True)
class RecordEncoder:
    """Encodes rows into the cache. ``facts``: what tells these encoders from others; ``chosen``: data.sft_cache.

    ``open_pipeline`` is called when something must be encoded, and again after ``release``.
    """

    open_pipeline: Callable[[], Pipeline]
    facts: Mapping[str, Any]
    target: Target
    chosen: Path | None
    _pipeline: Pipeline | None = None

    @property
    def pipeline(self) -> Pipeline:
        """The encoders, opened at their first use."""
        if self._pipeline is None:
            self._pipeline = self.open_pipeline()
        return self._pipeline

    def release(self) -> None:
        """Let go of the encoders: training needs their memory."""
        self._pipeline = None

    def files(self, root: Path) -> EncodedFiles:
        """Return the cache of a data set."""
        return EncodedFiles(self.chosen if self.chosen is not None else root / FOLDER)

    def text_key(self, text: str) -> dict[str, Any]:
        """Return everything that decides the condition of a text."""
        return {"what": "text", "encoders": dict(self.facts), "text": text}

    def media_key(self, file: MediaFile) -> dict[str, Any]:
        """Return everything that decides the latents of a file; BrokenMedia when it is not there."""
        return {
            "what": "latents",
            "encoders": dict(self.facts),
            "size": [self.target.height, self.target.width, self.target.frames, self.target.stride],
            "file": [file.kind, file.name, version_of(file)],
            # beside its data a cache may be moved with them; elsewhere it may serve several data sets
            "root": None if self.chosen is None else str(file.root),
        }

    def has(self, prompt: Prompt) -> bool:
        """True when everything of a row is in the cache; BrokenMedia when one of its files is not there."""
        files = media_files(prompt)
        cache = self.files(files[0].root)
        keys = [self.text_key(prompt.text), *map(self.media_key, files)]
        return all(cache.has(key) for key in keys)

    def encode(self, prompt: Prompt) -> None:
        """Encode what the cache lacks of a row; BrokenMedia when one of its files cannot be used."""
        files = media_files(prompt)
        cache = self.files(files[0].root)
        for file in files:
            key = self.media_key(file)
            if not cache.has(key):
                cache.write(key, self._latents(file), {})
        key = self.text_key(prompt.text)
        if not cache.has(key):
            (condition,) = self.pipeline.encode_text([prompt.text])
            cache.write(key, condition.tensors, condition.values)

    def read(self, prompt: Prompt) -> Record | None:
        """Return a row from the cache; None when something of it is missing or damaged, which is removed."""
        files = media_files(prompt)
        cache = self.files(files[0].root)
        keys = [self.text_key(prompt.text), *map(self.media_key, files)]
        found = [cache.read(key) for key in keys]
        for key, encoded in zip(keys, found, strict=True):
            if encoded is None:
                cache.discard(key)
        text, latents, *worse = found
        if text is None or latents is None or None in worse:
            return None
        clean = dict(latents.tensors)
        for other in worse:
            assert other is not None
            clean |= {rejected(stream): tensor for stream, tensor in other.tensors.items()}
        condition = ConditionRecord(tensors=text.tensors, values=text.values)
        return Record(clean=clean, condition=condition)

    def _latents(self, file: MediaFile) -> Streams:
        import torch

        media = read_media(file, self.target)
        seed = latent_seed(content_digest(file), self.target)
        return self.pipeline.encode_media(media, torch.Generator("cpu").manual_seed(seed))


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of one row: ``broken`` says why it cannot be used. Of no row: a pause to look around."""

    row: int | None = None
    broken: str | None = None


def outcome_of(encoder: RecordEncoder, prompt: Prompt) -> Outcome:
    """Encode one row into the cache; a file that cannot be used is an outcome, not an error."""
    try:
        encoder.encode(prompt)
    except BrokenMedia as error:
        return Outcome(prompt.row, str(error))
    return Outcome(prompt.row)


def media_files(prompt: Prompt) -> list[MediaFile]:
    """Return the files of a row: its own, and the one that it was preferred to."""
    return [file for file in (prompt.media, prompt.rejected) if isinstance(file, MediaFile)]


def latent_seed(content: str, target: Target) -> int:
    """Return the seed of a file's latents: bytes 8 to 15 of a SHA-256, as a number below 2^63."""
    what = {
        "content": content,
        "size": [target.height, target.width, target.frames, target.stride],
    }
    digest = sha256(canonical(what).encode()).digest()
    return int.from_bytes(digest[8:16], "big") % 2**63


def build_encoder(recipe: Any, family: Family, context: Context, catalog: Catalog) -> RecordEncoder:
    """Return the encoder of a recipe; nothing of its checkpoint is loaded yet."""
    checkpoint = encoder_checkpoint(recipe)

    def open_pipeline() -> Pipeline:
        pipeline = family.pipeline(checkpoint, context)
        if pipeline is None:
            raise BadInput(
                f"model.family: {recipe.model.family!r} has no encoders of its own, so media cannot be "
                "encoded; use another family"
            )
        return pipeline

    sampling = recipe.sampling
    return RecordEncoder(
        open_pipeline=open_pipeline,
        facts={
            "family": recipe.model.family,
            "version": catalog.find("family", recipe.model.family).version,
            "options": None if family.options is None else family.options.model_dump(mode="json"),
            "checkpoint": checkpoint_facts(checkpoint, recipe.model.components),
            "dtype": context.dtype,
        },
        target=Target(
            height=sampling.height,
            width=sampling.width,
            frames=sampling.num_frames,
            stride=recipe.data.sft_frame_stride,
        ),
        chosen=recipe.data.sft_cache,
    )


def encoder_checkpoint(recipe: Any) -> str:
    """Return where text encoders and VAE come from."""
    chosen: str = recipe.data.sft_encoder_checkpoint or recipe.model.checkpoint
    return chosen


def checkpoint_facts(checkpoint: str, trained: Sequence[str]) -> str:
    """Return what tells a checkpoint's encoders apart: its id, or a digest of each file's name, size, time.

    The folders of the trained components are left out: no encoder reads them.
    """
    folder = Path(checkpoint)
    if not folder.is_dir():
        return checkpoint
    found = []
    for path in sorted(folder.rglob("*")):
        name = path.relative_to(folder)
        if path.is_file() and name.parts[0] not in trained and not name.parts[0].startswith("."):
            facts = path.stat()
            found.append([name.as_posix(), facts.st_size, facts.st_mtime_ns])
    return sha256(canonical({"files": found}).encode()).hexdigest()[:16]

"""``HfDatasetSource``: rows of a data set on disk, whose media are handed on as the bytes that lie there."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from hashlib import sha256
from pathlib import Path
from typing import Any

from drl.api import Context, DataError, DataSource, MediaFile, Prompt
from drl.mathematics.epochs import EpochCursor, shuffled
from drl_data_hf_datasets.columns import choose_columns
from drl_data_hf_datasets.config import HfDatasetOptions

SHOWN = 10

log = logging.getLogger(__name__)


class HfDatasetSource(DataSource):
    """One row per row of the data set that has a text; ``row`` is its number there. Nothing is decoded here.

    ``skipped`` holds the numbers of the rows without text.
    """

    def __init__(self, options: HfDatasetOptions, context: Context) -> None:
        super().__init__(options, context)
        self.path = Path(options.path)
        rows = opened(self.path, options.split)
        self.columns = choose_columns(rows.features, options)
        self._rows = self.columns.undecoded(rows)
        texts: list[Any] = list(rows[options.text_column])
        self.skipped = tuple(n for n, text in enumerate(texts) if not (text or "").strip())
        self._settle_skipped(len(texts))
        without = set(self.skipped)
        self.texts = {n: text for n, text in enumerate(texts) if n not in without}
        self._numbers = list(self.texts)
        count = len(self._numbers)
        order_of = shuffled(context, "data_shuffle", count) if options.shuffle else None
        self.cursor = EpochCursor(count, order_of or (lambda epoch: range(count)))

    def take(self, count: int) -> list[Prompt]:
        """Return the next rows, each with its image or video as the data set holds it."""
        return [self._prompt(*self.cursor.next()) for _ in range(count)]

    def rows(self) -> int:
        """Return the number of rows with a text."""
        return len(self._numbers)

    def state(self) -> dict[str, Any]:
        """Return the position, and what tells the data apart."""
        return {**self.cursor.state(), **self._identity()}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go to a saved position; DataError when the rows are not those of the saved run."""
        mine = self._identity()
        if {key: state[key] for key in mine} != mine:
            raise DataError(
                f"data.hf_dataset.path: the rows of {self.path} are not those of the saved run; "
                "give the data set and the options of that run, or start a new run"
            )
        self.cursor.restore(state)

    def _identity(self) -> dict[str, Any]:
        texts = json.dumps(self.texts).encode()
        return {
            "rows": len(self._numbers),
            "texts": sha256(texts).hexdigest()[:16],
            "shuffle": self.options.shuffle,
        }

    def _settle_skipped(self, total: int) -> None:
        if not self.skipped:
            return
        shown = f"{len(self.skipped)} rows without text, such as {list(self.skipped[:SHOWN])}"
        if self.context.section.on_broken_row != "skip" or len(self.skipped) == total:
            raise DataError(
                f"data.hf_dataset.text_column: {self.path} has {shown}; "
                "remove them, or leave them out with data.on_broken_row = 'skip'"
            )
        log.warning("%s: %s, which are skipped", self.path, shown)

    def _prompt(self, place: int, epoch: int) -> Prompt:
        number = self._numbers[place]
        stored = self._rows[number][self.columns.media]
        return Prompt(
            row=number,
            text=self.texts[number],
            epoch=epoch,
            media=media_file(self.path, number, self.columns.kind, stored),
        )


def media_file(root: Path, number: int, kind: str, stored: Any) -> MediaFile | None:
    """Return what a row holds: bytes, or the name of a file, relative to the data set; None for nothing."""
    if isinstance(stored, str):
        stored = {"path": stored, "bytes": None}
    if not isinstance(stored, dict):
        return None
    content, name = stored.get("bytes"), stored.get("path")
    if content is not None:
        version = sha256(content).hexdigest()
        shown = f"row {number}" if not name else f"row {number} ({name})"
        return MediaFile(root=root, name=shown, kind=kind, content=content, version=version)
    return MediaFile(root=root, name=name, kind=kind) if name else None


def opened(path: Path, split: str | None) -> Any:
    """Return the rows of a split; DataError for what is no data set on disk, or another split."""
    from datasets import DatasetDict, load_from_disk

    try:
        found = load_from_disk(str(path))
    except (OSError, ValueError, KeyError) as error:
        raise DataError(
            f"data.hf_dataset.path: {path} is not a data set that save_to_disk wrote ({error})"
        ) from error
    if not isinstance(found, DatasetDict):
        if split is not None and split != str(found.split):
            raise DataError(
                f"data.hf_dataset.split: {path} holds one split ({found.split}); leave the option out"
            )
        return found
    if split is None and len(found) == 1:
        return next(iter(found.values()))
    if split not in found:
        given = "is not set" if split is None else f"is {split!r}"
        raise DataError(
            f"data.hf_dataset.split {given}, but {path} has the splits {', '.join(found)}; name one"
        )
    return found[split]

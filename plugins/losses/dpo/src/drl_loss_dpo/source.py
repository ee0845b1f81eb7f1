"""``PreferenceSource``: preferences from a JSON-lines file, epoch after epoch, resumable at any row."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path, PurePath
from typing import Any

from drl.api import Context, DataError, DataSource, MediaFile, Prompt
from drl.mathematics.epochs import EpochCursor, shuffled
from drl_loss_dpo.config import PreferencesConfig
from drl_loss_dpo.rows import Preference, broken_text, digest, read_preferences

log = logging.getLogger(__name__)

VIDEOS = frozenset({".avi", ".mkv", ".mov", ".mp4", ".webm"})


class PreferenceSource(DataSource):
    """One prompt per row, with the chosen file as its media and the other one as rejected.

    Files are named relative to the folder of the rows. A prompt's ``row`` is its line, counted from 1.
    """

    def __init__(self, options: PreferencesConfig, context: Context) -> None:
        super().__init__(options, context)
        section = context.section
        if section.prompt_data is None:
            raise DataError("data.prompt_data is not set; give a .jsonl file of preferences")
        self.path = Path(section.prompt_data)
        self._rows, broken = read_preferences(self.path, input_key=section.input_key)
        if broken and section.on_broken_row == "refuse":
            raise DataError(
                f'{broken_text(self.path, broken)}\ncorrect them, or set data.on_broken_row = "skip"'
            )
        if broken:
            log.warning("%s\nthey are skipped", broken_text(self.path, broken))
        rows = len(self._rows)
        order_of = shuffled(context, "data_shuffle", rows) if options.shuffle else None
        self._cursor = EpochCursor(rows, order_of or (lambda epoch: range(rows)))

    def take(self, count: int) -> list[Prompt]:
        """Return the next rows; their files are not opened."""
        return [
            self._prompt(self._rows[place], epoch)
            for place, epoch in (self._cursor.next() for _ in range(count))
        ]

    def known_prompts(self) -> list[Prompt]:
        """Return the prompts of all rows, in file order."""
        return [self._prompt(row, 0) for row in self._rows]

    def rows(self) -> int:
        """Return the number of preferences."""
        return len(self._rows)

    def state(self) -> dict[str, Any]:
        """Return epoch, position in it, and what tells the file apart."""
        return {**self._cursor.state(), **self._identity()}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go to a saved position; DataError when the rows are not those of the saved run."""
        mine = self._identity()
        if {key: state[key] for key in mine} != mine:
            raise DataError(
                f"data.prompt_data: the rows of {self.path}, or data.preferences.shuffle, are not those of "
                "the saved run; give them back, or start a new run"
            )
        self._cursor.restore(state)

    def _identity(self) -> dict[str, Any]:
        return {"digest": digest(self._rows), "shuffle": self.options.shuffle}

    def _prompt(self, row: Preference, epoch: int) -> Prompt:
        return Prompt(
            row=row.number,
            text=row.text,
            epoch=epoch,
            media=self._file(row.chosen),
            rejected=self._file(row.rejected),
        )

    def _file(self, name: str) -> MediaFile:
        kind = "video" if PurePath(name).suffix.lower() in VIDEOS else "image"
        return MediaFile(root=self.path.parent, name=name, kind=kind)

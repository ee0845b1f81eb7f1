"""``JsonlSource``: prompts from a JSON-lines file, epoch after epoch, resumable at any prompt."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from drl.builtin.config_data import JsonlOptions
from drl.builtin.jsonl_rows import SHOWN, Row, broken_text, digest, media_of, read_prompts
from drl.builtin.prompt_buffer import PromptBuffer
from drl.errors import DataError
from drl.interfaces.data import BufferChoice, DataSource
from drl.mathematics.epochs import EpochCursor, shuffled
from drl.types import Context, Group, Prompt

log = logging.getLogger(__name__)


class JsonlSource(DataSource):
    """Rows in file order, or reordered per epoch; groups given back come first.

    A prompt's ``row`` is its line number in the file, counted from 1, so equal texts stay two rows.
    ``skipped`` holds the line numbers of rows with an empty text. A row whose metadata name an image or
    a video has it as its media, relative to the folder of the file.
    """

    def __init__(self, options: JsonlOptions, context: Context) -> None:
        super().__init__(options, context)
        section = context.section
        if not section.prompt_data:
            raise DataError("data.prompt_data is not set; give the path of a .jsonl file")
        self.path = Path(section.prompt_data)
        found = read_prompts(
            self.path,
            input_key=section.input_key,
            metadata_key=section.metadata_key,
            skip_broken=section.on_broken_row == "skip",
        )
        self.skipped = tuple(found.empty)
        if found.empty:
            shown = ", ".join(map(str, found.empty[:SHOWN]))
            more = ", …" if len(found.empty) > SHOWN else ""
            log.warning(
                "%s: %d rows without text are skipped: lines %s%s",
                self.path,
                len(found.empty),
                shown,
                more,
            )
        if found.broken:
            log.warning("%s", broken_text(self.path, found.broken) + "\nthey are skipped")
        self._rows: list[Row] = found.rows[: options.limit]
        self._digest = digest(self._rows)
        self._by_number = {row.number: row for row in self._rows}
        self._buffer = PromptBuffer()
        rows = len(self._rows)
        order_of = shuffled(context, "data_shuffle", rows) if options.shuffle else None
        self._cursor = EpochCursor(rows, order_of or (lambda epoch: range(rows)))

    def take(self, count: int) -> list[Prompt]:
        """Return ``count`` prompts: those given back first, then the next rows."""
        if count < 0:
            raise DataError(f"a number of prompts is not negative, got {count}")
        first = self._buffer.take(count)
        return [*first, *(self._next() for _ in range(count - len(first)))]

    def give_back(self, groups: Sequence[Group]) -> None:
        """Take groups back; ``take`` returns their prompts first, in this order or as a filter chooses."""
        for group in groups:
            self._row(group.prompt.row)
        self._buffer.add(groups)

    def use_buffer_filter(self, choose: BufferChoice) -> None:
        """Let ``choose`` pick the groups whose prompts are drawn again."""
        self._buffer.choose = choose

    def known_prompts(self) -> list[Prompt]:
        """Return the prompts of all rows, in file order."""
        return [self._prompt(row, 0) for row in self._rows]

    def rows(self) -> int:
        """Return the number of rows of one epoch, after ``limit``."""
        return len(self._rows)

    def state(self) -> dict[str, Any]:
        """Return epoch, position in it, groups given back, and what tells the file apart."""
        return {
            **self._cursor.state(),
            "buffer": self._buffer.state(),
            **self._identity(),
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go to a saved position; DataError when the rows are not those of the saved run."""
        mine = self._identity()
        saved = {key: state[key] for key in mine}
        if saved != mine:
            raise DataError(
                f"data.prompt_data: the rows of {self.path} are not those of the saved run\n"
                f"  saved: {saved}\n  now:   {mine}\n"
                "give the file and the [data.jsonl] options of that run, or start a new run"
            )
        self._cursor.restore(state)
        self._buffer.restore(
            state["buffer"], lambda row, epoch: self._prompt(self._row(row), epoch)
        )

    def _identity(self) -> dict[str, Any]:
        return {
            "rows": len(self._rows),
            "shuffle": self.options.shuffle,
            "digest": self._digest,
        }

    def _next(self) -> Prompt:
        place, epoch = self._cursor.next()
        return self._prompt(self._rows[place], epoch)

    def _prompt(self, row: Row, epoch: int) -> Prompt:
        return Prompt(
            row=row.number,
            text=row.text,
            epoch=epoch,
            metadata=row.metadata,
            media=media_of(row.metadata, self.path.parent),
        )

    def _row(self, number: int) -> Row:
        if number not in self._by_number:
            raise DataError(f"{self.path} has no prompt in line {number}; it cannot be given back")
        return self._by_number[number]

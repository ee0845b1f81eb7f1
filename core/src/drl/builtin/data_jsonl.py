"""``JsonlSource``: prompts from a JSON-lines file, epoch after epoch, resumable at any prompt."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from drl.builtin.config_data import JsonlOptions
from drl.builtin.jsonl_rows import Row, digest, read_prompts
from drl.errors import DataError
from drl.interfaces.data import DataSource
from drl.mathematics.epochs import EpochCursor, shuffled
from drl.types import Context, Group, Prompt

log = logging.getLogger(__name__)


class JsonlSource(DataSource):
    """Rows in file order, or reordered per epoch; groups given back come first.

    A prompt's ``row`` is its line number in the file, counted from 1, so equal texts stay two rows.
    ``skipped`` holds the line numbers of rows with an empty text.
    """

    def __init__(self, options: JsonlOptions, context: Context) -> None:
        super().__init__(options, context)
        section = context.section
        if not section.prompt_data:
            raise DataError("data.prompt_data is not set; give the path of a .jsonl file")
        self.path = Path(section.prompt_data)
        found = read_prompts(
            self.path, input_key=section.input_key, metadata_key=section.metadata_key
        )
        self.skipped = tuple(found.empty)
        if found.empty:
            log.warning("%s: %d rows without text are skipped", self.path, len(found.empty))
        self._rows: list[Row] = found.rows[: options.limit]
        self._digest = digest(self._rows)
        self._by_number = {row.number: row for row in self._rows}
        self._buffer: deque[Prompt] = deque()
        rows = len(self._rows)
        order_of = shuffled(context, "data_shuffle", rows) if options.shuffle else None
        self._cursor = EpochCursor(rows, order_of or (lambda epoch: range(rows)))

    def take(self, count: int) -> list[Prompt]:
        """Return ``count`` prompts: those given back first, then the next rows."""
        if count < 0:
            raise DataError(f"a number of prompts is not negative, got {count}")
        return [self._buffer.popleft() if self._buffer else self._next() for _ in range(count)]

    def give_back(self, groups: Sequence[Group]) -> None:
        """Take the groups' prompts back; ``take`` returns them first, in this order."""
        for group in groups:
            self._row(group.prompt.row)
        self._buffer.extend(group.prompt for group in groups)

    def rows(self) -> int:
        """Return the number of rows of one epoch, after ``limit``."""
        return len(self._rows)

    def state(self) -> dict[str, Any]:
        """Return epoch, position in it, prompts given back, and what tells the file apart."""
        return {
            **self._cursor.state(),
            "buffer": [[prompt.row, prompt.epoch] for prompt in self._buffer],
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
        self._buffer = deque(self._prompt(self._row(row), epoch) for row, epoch in state["buffer"])

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
        return Prompt(row=row.number, text=row.text, epoch=epoch, metadata=row.metadata)

    def _row(self, number: int) -> Row:
        if number not in self._by_number:
            raise DataError(f"{self.path} has no prompt in line {number}; it cannot be given back")
        return self._by_number[number]

"""Data source ``glyphs``: pictures of random four-letter strings with the prompt that asks for each.

No word of the shipped lists is ever drawn, so that training on this source leaves them held out.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any

import numpy as np
import torch

from drl.api import Context, DataError, DataSource, Media, Prompt
from drl.mathematics.epochs import EpochCursor, shuffled
from drl_family_sd3.config import GlyphOptions
from drl_family_sd3.glyphs.render import render_varied
from drl_family_sd3.glyphs.words import prompt_of, random_strings


class GlyphSource(DataSource):
    """``count`` rows, reordered every epoch; row, picture and order depend on the run seed alone."""

    def __init__(self, options: GlyphOptions, context: Context) -> None:
        super().__init__(options, context)
        order_of = shuffled(context, "glyph_order", options.count)
        self.cursor = EpochCursor(options.count, order_of)

    @cached_property
    def words(self) -> Sequence[str]:
        """The string of each row."""
        return random_strings(self.options.count, self.context.generator("glyph_words"))

    def take(self, count: int) -> list[Prompt]:
        """Return the next rows with their pictures, ``(3, 1, 16, 48)`` float32 in [0, 1]."""
        return [self._next() for _ in range(count)]

    def rows(self) -> int:
        """Return the number of rows of an epoch."""
        return int(self.options.count)

    def state(self) -> dict[str, Any]:
        """Return epoch and position, and the number of rows they refer to."""
        return {**self.cursor.state(), "count": self.options.count}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go to a saved position; DataError when it belongs to another number of rows."""
        if state["count"] != self.options.count:
            raise DataError(
                f"data.glyphs.count is {self.options.count}, the saved run had {state['count']}; "
                "give the same number, or start a new run"
            )
        self.cursor.restore(state)

    def _next(self) -> Prompt:
        row, epoch = self.cursor.next()
        word = self.words[row]
        return Prompt(
            row=row,
            text=prompt_of(word),
            epoch=epoch,
            metadata={"target": word},
            media=Media(pixels=self._pixels(row, word)),
        )

    def _pixels(self, row: int, word: str) -> torch.Tensor:
        picture = render_varied(word, self.context.generator("glyph_render", row))
        pixels = torch.from_numpy(np.array(picture)).permute(2, 0, 1).float() / 255.0
        return pixels[:, None]

"""The data source ``glyphs``: rows, pictures, order, resume."""

from __future__ import annotations

import pytest
import torch

from drl.api import Context, DataError
from drl_family_sd3.config import GlyphOptions
from drl_family_sd3.glyph_source import GlyphSource
from drl_family_sd3.glyphs.words import dev_words, rl_words, test_words


def source(count: int = 7, seed: int = 3) -> GlyphSource:
    return GlyphSource(GlyphOptions(count=count), Context(seed=seed))


def test_pictures_are_rows_of_the_size_the_model_makes() -> None:
    (prompt,) = source().take(1)
    assert prompt.media is not None
    assert prompt.media.pixels.shape == (3, 1, 16, 48)
    assert 0 <= prompt.media.pixels.min() < prompt.media.pixels.max() <= 1
    assert prompt.text == f'sign "{prompt.metadata["target"]}"'


def test_a_row_shows_the_same_picture_in_every_epoch() -> None:
    made = source(count=3)
    first, second = ({p.row: p for p in made.take(3)} for _ in range(2))
    assert first.keys() == second.keys() == {0, 1, 2}
    for row, prompt in first.items():
        assert prompt.media is not None
        assert second[row].media is not None
        assert torch.equal(prompt.media.pixels, second[row].media.pixels)  # type: ignore[union-attr]
    assert {p.epoch for p in second.values()} == {1}


def test_no_word_of_the_lists_is_ever_drawn() -> None:
    listed = {*rl_words(), *dev_words(), *test_words()}
    assert listed.isdisjoint(source(count=2000).words)


def test_a_position_of_another_number_of_rows_is_refused() -> None:
    with pytest.raises(DataError, match=r"data\.glyphs\.count"):
        source(count=5).restore(source(count=7).state())

"""Which words are written: three disjoint word lists, and random strings that avoid them all."""

from __future__ import annotations

import string
from functools import cache
from importlib import resources

import torch

LENGTH = 4
LETTERS = string.ascii_uppercase


@cache
def _word_list(name: str) -> tuple[str, ...]:
    """Words of ``data/<name>.txt`` in file order; every line is ``LENGTH`` letters A to Z."""
    file = resources.files(__package__) / "data" / f"{name}.txt"
    words = tuple(file.read_text(encoding="ascii").split())
    bad = [word for word in words if len(word) != LENGTH or not set(word) <= set(LETTERS)]
    if bad or len(set(words)) != len(words):
        raise ValueError(
            f"{file}: expected distinct words of {LENGTH} capital letters, one a line; "
            f"wrong: {bad or 'a word appears twice'}. Correct that file."
        )
    return words


def rl_words() -> tuple[str, ...]:
    """Words that reinforcement learning may use as prompts."""
    return _word_list("rl_words")


def dev_words() -> tuple[str, ...]:
    """Held-out words for choosing settings; never trained on."""
    return _word_list("dev_words")


def test_words() -> tuple[str, ...]:
    """Held-out words for the final acceptance check alone; never used to choose anything."""
    return _word_list("test_words")


test_words.__test__ = False  # type: ignore[attr-defined]  # pytest: this is not a test


def prompt_of(word: str) -> str:
    """The prompt that asks for ``word``, for example ``sign "WIND"``."""
    return f'sign "{word}"'


def random_strings(count: int, generator: torch.Generator) -> list[str]:
    """``count`` strings of random letters (repeats possible), none of them in any word list."""
    reserved = {*rl_words(), *dev_words(), *test_words()}
    strings: list[str] = []
    while len(strings) < count:
        draw = torch.randint(len(LETTERS), (count, LENGTH), generator=generator)
        fresh = ("".join(LETTERS[i] for i in row) for row in draw.tolist())
        strings.extend(word for word in fresh if word not in reserved)
    return strings[:count]

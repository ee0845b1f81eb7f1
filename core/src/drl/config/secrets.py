"""Secrets stand in a recipe as ``env:NAME`` and are read from the environment when they are used."""

from __future__ import annotations

import os

from drl.errors import BadInput

PREFIX = "env:"


def reveal(text: str) -> str:
    """Return the value behind ``env:NAME``, other text as it is; BadInput when NAME is not set."""
    if not text.startswith(PREFIX):
        return text
    name = text.removeprefix(PREFIX)
    if not os.environ.get(name):
        raise BadInput(f"the recipe says {text!r}, but the variable {name} is not set; export it")
    return os.environ[name]

"""Errors of the LoRA package."""

from __future__ import annotations

from collections.abc import Iterable

from drl.errors import DrlError

SHOWN_NAMES = 8
LONGEST_NAME = 160
LONGEST_VALUE = 80


class LoraError(DrlError, ValueError):
    """A LoRA setting, adapter tensor or adapter file that cannot be used; nothing was changed."""

    exit_code = 2  # it was given; nothing ran yet


class AdapterNotFound(LoraError, FileNotFoundError):
    """An adapter directory, or one of its files, does not exist."""

    def __str__(self) -> str:  # OSError's own form depends on the number of arguments
        return str(self.args[0])


def shown(value: object) -> str:
    """Return a value for a message, cut to ``LONGEST_VALUE`` characters."""
    try:
        text = repr(value)
    except ValueError:  # python refuses to print integers of thousands of digits
        text = "a huge number"
    return text if len(text) <= LONGEST_VALUE else text[: LONGEST_VALUE - 3] + "..."


def name_list(names: Iterable[str]) -> str:
    """Join names for a message: at most ``SHOWN_NAMES`` of them, long ones cut."""
    listed = list(names)
    rest = len(listed) - SHOWN_NAMES
    cut = [name if len(name) <= LONGEST_NAME else name[:LONGEST_NAME] + "..." for name in listed]
    text = ", ".join(cut[:SHOWN_NAMES])
    return f"{text} and {rest} more" if rest > 0 else text

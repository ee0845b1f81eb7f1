"""``BrokenMedia``: why one file of a data set cannot be used."""

from __future__ import annotations

from drl.errors import DataError


class BrokenMedia(DataError):
    """A file that is missing, cannot be decoded or does not fit the recipe; the message begins with its name."""

"""The type of options that name a folder, or a file, for results."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click


class NamedPlace(click.Path):
    """A path that has a name: the empty one would be the working directory."""

    def __init__(self, what: str = "folder") -> None:
        super().__init__(file_okay=what == "file", dir_okay=what == "folder", path_type=Path)
        self.what = what

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """Return the path; an empty text, such as an unset variable leaves, is an error."""
        if value == "":
            self.fail(f"it is empty; name a {self.what}", param, ctx)
        return super().convert(value, param, ctx)

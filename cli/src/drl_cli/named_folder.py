"""The type of options that name a folder for results."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click


class NamedFolder(click.Path):
    """A path that has a name: the empty one would be the working directory."""

    def __init__(self) -> None:
        super().__init__(file_okay=False, path_type=Path)

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """Return the path; an empty text, such as an unset variable leaves, is an error."""
        if value == "":
            self.fail("it is empty; name a folder", param, ctx)
        return super().convert(value, param, ctx)

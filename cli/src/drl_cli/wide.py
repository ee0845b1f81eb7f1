"""The console that tables of figures are printed to."""

from __future__ import annotations

from rich.console import Console

WIDTH = 120


def wide_console() -> Console:
    """Return a console of 120 columns at least: a narrow terminal may break a line, but no figure is cut short."""
    console = Console(highlight=False)
    console.width = max(console.width, WIDTH)
    return console

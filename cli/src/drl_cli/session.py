"""What one call of ``drl`` knows: its global options, and the plugins once a command asks for them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from drl.catalog import Catalog


@dataclass(slots=True)
class Session:
    """``without``: distributions to leave out; ``debug``: show tracebacks."""

    without: tuple[str, ...] = ()
    debug: bool = False
    loaded: Catalog | None = None

    @property
    def catalog(self) -> Catalog:
        """Load the plugins at the first use."""
        if self.loaded is None:
            from drl.catalog import Catalog

            self.loaded = Catalog.load(self.without)
        return self.loaded

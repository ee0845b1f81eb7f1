"""Discovery that sees only the plugins a test asks for."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.metadata import entry_points

from drl.catalog import Catalog
from drl.errors import BadInput
from drl.plugins import GROUP, OFF_VARIABLE, normalized, owner_of


@contextmanager
def only_plugins(*distributions: str) -> Iterator[Catalog]:
    """Switch off all installed plugins but these, here and in child processes; gives their catalog.

    BadInput when one of them has no plugin installed.
    """
    installed = sorted({owner_of(point)[0] for point in entry_points(group=GROUP)})
    wanted = {normalized(name) for name in distributions}
    absent = sorted(wanted - {normalized(name) for name in installed})
    if absent:
        raise BadInput(f"no plugin of {', '.join(absent)} is installed; have {installed}")
    before = os.environ.get(OFF_VARIABLE)
    os.environ[OFF_VARIABLE] = ",".join(n for n in installed if normalized(n) not in wanted)
    try:
        yield Catalog.load()
    finally:
        if before is None:
            del os.environ[OFF_VARIABLE]
        else:
            os.environ[OFF_VARIABLE] = before

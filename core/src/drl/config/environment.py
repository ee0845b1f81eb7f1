"""Environment variables that a recipe gives to its training processes, and those that come too late.

The first rank is the process that reads the recipe: what a library or the interpreter reads at its own
start has no effect there any more.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")

TOO_LATE = (
    "LD_",
    "DYLD_",
    "PYTHON",
    "OMP_",
    "GOMP_",
    "KMP_",
    "MKL_",
    "OPENBLAS_",
    "MALLOC_",
    "CUDA_VISIBLE_DEVICES",
    "DRL_PLUGINS_OFF",
)
"""Beginnings of names that are read when a process or a library starts."""


def environment(variables: dict[str, str]) -> dict[str, str]:
    """Refuse, with a ValueError, names that are none and names that would have no effect."""
    for name, value in variables.items():
        if not _NAME.fullmatch(name) or "\0" in value:
            raise ValueError(f"must hold names and text of environment variables, got {name!r}")
        if name.startswith(TOO_LATE):
            raise ValueError(
                f"must not hold {name}: it is read when the process starts, which it has; export it "
                "before drl run"
            )
    return variables


@contextmanager
def training_environment(variables: Mapping[str, str]) -> Iterator[None]:
    """Set variables in this process, and so in those that it starts; what was there comes back after."""
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value

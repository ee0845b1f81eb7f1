"""``JsonlLogger``: the figures of a run as a file of one JSON object per iteration."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TextIO

from drl.errors import ContractError, RunDirectoryError
from drl.interfaces.logger import Logger, RunFacts
from drl.observe.files import write_text_atomic
from drl.types import Context

FILE_NAME = "metrics.jsonl"
RESERVED = ("step", "time")


class JsonlLogger(Logger):
    """Appends ``{"step": …, "time": …, **values}`` to ``metrics.jsonl``; ``time`` is a Unix time.

    A run that resumes at iteration k first drops the rows from k on: they are about to be repeated.
    """

    def __init__(self, options: Any, context: Context) -> None:
        super().__init__(options, context)
        self._file: TextIO | None = None

    def start(self, run: RunFacts) -> None:
        """Open the file of the run directory for appending."""
        path = run.run_dir / FILE_NAME
        if path.exists():
            drop_rows_from(path, run.first)
        self._file = path.open("a", encoding="utf-8")

    def metrics(self, step: int, values: Mapping[str, float]) -> None:
        """Write one row and flush it; ContractError names a figure that is not finite."""
        if self._file is None:
            raise RunDirectoryError("logger jsonl: metrics() was called before start()")
        row = {"step": step, "time": round(time.time(), 3), **finite(values)}
        self._file.write(json.dumps(row, allow_nan=False) + "\n")
        self._file.flush()

    def close(self) -> None:
        """Close the file."""
        if self._file is not None:
            self._file.close()
            self._file = None


def finite(values: Mapping[str, float]) -> dict[str, float]:
    """Return the figures as plain floats; ContractError when one is NaN, infinite or misnamed."""
    for name, value in values.items():
        if name in RESERVED:
            raise ContractError(f"logger jsonl: a metric must not be called {name!r}")
        if not math.isfinite(value):
            raise ContractError(
                f"logger jsonl: metric {name!r} is {value}; leave a figure out when it is unknown"
            )
    return {name: float(value) for name, value in values.items()}


def drop_rows_from(path: Path, first: int) -> None:
    """Rewrite a metrics file without the rows of iterations ``first`` and later, in one step.

    A last line without its end is what a kill leaves behind: it is dropped too. Any other line
    that is not a row is an error.
    """
    content = path.read_text(encoding="utf-8")
    *lines, unfinished = content.split("\n")
    steps = [_step(path, number, line) for number, line in enumerate(lines, start=1)]
    # a run that starts over also scores its untrained weights again, as step -1
    kept = [line for line, step in zip(lines, steps, strict=True) if first > 0 and step < first]
    if len(kept) < len(lines) or unfinished:
        write_text_atomic(path, "".join(f"{line}\n" for line in kept))


def _step(path: Path, number: int, line: str) -> int:
    try:
        return int(json.loads(line)["step"])
    except (ValueError, KeyError, TypeError) as error:
        raise RunDirectoryError(
            f"{path}: line {number} is not a row of metrics; move the file away to resume"
        ) from error

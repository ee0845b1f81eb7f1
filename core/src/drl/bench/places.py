"""Where a bench writes, looked at before it measures: what cannot be kept would be learnt only afterwards."""

from __future__ import annotations

import tempfile
from collections.abc import Iterable
from pathlib import Path

from drl.errors import BadInput
from drl.plan.rates import VARIABLE, rates_path


def check_figures(path: Path) -> None:
    """Refuse a file for figures that is there already, or cannot be written."""
    if path.exists():
        raise BadInput(f"--json: {path} exists; name a new file, or remove it")
    if not path.parent.is_dir():
        raise BadInput(f"--json: there is no folder {path.parent}; make it, or name another")
    error = refusal(path.parent)
    if error is not None:
        raise BadInput(f"--json: {path} cannot be written: {error.strerror}; name another file")


def check_rates() -> None:
    """Refuse to measure rates that cannot be kept."""
    path = rates_path()
    error = refusal(path.parent)
    if error is not None:
        raise BadInput(
            f"{path}, which keeps the rates of this machine, cannot be written: {error.strerror}\n"
            f"name another file by the variable {VARIABLE}, or keep no rates with --no-record"
        )


def check_run_dirs(paths: Iterable[Path | None]) -> None:
    """Refuse run directories with something in them."""
    for path in paths:
        if path is None or not path.exists():
            continue
        if not path.is_dir():
            raise BadInput(f"--run-dir: {path} is a file; name a new folder")
        if any(path.iterdir()):
            raise BadInput(f"--run-dir: {path} is not empty; name a new folder")


def refusal(folder: Path) -> OSError | None:
    """Return why no file can be made in a folder, or in the nearest above it that is there; None if one can."""
    try:
        there = next(path for path in (folder, *folder.absolute().parents) if path.exists())
        with tempfile.NamedTemporaryFile(dir=there):
            return None
    except OSError as error:
        return error

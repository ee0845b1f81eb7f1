"""Replacing a directory in one step, so that a reader never meets a half-written one."""

from __future__ import annotations

import os
import shutil
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def replaced_directory(directory: Path) -> Iterator[Path]:
    """Yield an empty sibling directory that takes the place of ``directory`` on success.

    Files directly in it are flushed to disk first. On an exception the sibling is removed and
    ``directory`` stays as it was. An old ``directory`` is moved aside, then deleted; if the process
    is killed between the two renames the old content is still there as ``.<name>.old-<id>``.
    """
    token = uuid.uuid4().hex[:12]
    directory.parent.mkdir(parents=True, exist_ok=True)
    fresh = directory.with_name(f".{directory.name}.new-{token}")
    fresh.mkdir()
    try:
        yield fresh
        for path in fresh.iterdir():
            _flush(path)
        _flush(fresh)
        _swap(fresh, directory, directory.with_name(f".{directory.name}.old-{token}"))
        _flush(directory.parent)
    except BaseException:
        shutil.rmtree(fresh, ignore_errors=True)
        raise


def _swap(fresh: Path, directory: Path, aside: Path) -> None:
    if not directory.exists():
        fresh.rename(directory)
        return
    directory.rename(aside)
    try:
        fresh.rename(directory)
    except OSError:
        aside.rename(directory)
        raise
    shutil.rmtree(aside)


def _flush(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)

"""The digests of a checkpoint's files: written last, and the first thing that is read."""

from __future__ import annotations

import hashlib
import json
import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from drl.observe.files import flush_directory, write_text_atomic

MANIFEST = "manifest.json"
THREADS = 8
"""Files hashed side by side; hashing lets other threads run."""


def write_manifest(folder: Path) -> None:
    """Flush every file to disk and write their SHA-256 digests by path."""
    files = files_of(folder)
    with ThreadPoolExecutor(THREADS, thread_name_prefix="drl-hash") as pool:
        digests = list(pool.map(_flushed_digest, files))
    names = [file.relative_to(folder).as_posix() for file in files]
    table = dict(zip(names, digests, strict=True))
    write_text_atomic(folder / MANIFEST, json.dumps(table, indent=2, sort_keys=True) + "\n")
    for path in [folder, *(path for path in folder.rglob("*") if path.is_dir())]:
        flush_directory(path)


def files_of(folder: Path) -> list[Path]:
    """Return every file of a checkpoint but the manifest, in order."""
    found = sorted(path for path in folder.rglob("*") if path.is_file())
    return [path for path in found if path != folder / MANIFEST]


def _flushed_digest(file: Path) -> str:
    with file.open("rb") as stream:
        digest = hashlib.file_digest(stream, "sha256").hexdigest()
        os.fsync(stream.fileno())
    return digest


def _digest(file: Path) -> str:
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def damage(folder: Path) -> str | None:
    """Return what is wrong with a checkpoint folder, or None; reads every byte of it."""
    if not folder.is_dir():
        return "the folder is missing"
    try:
        digests: Any = json.loads((folder / MANIFEST).read_text("utf-8"))
    except FileNotFoundError:
        return f"{MANIFEST} is missing"
    except (OSError, ValueError) as error:
        return f"{MANIFEST} is not JSON" if isinstance(error, ValueError) else f"{error}"
    if not isinstance(digests, dict) or not digests:
        return f"{MANIFEST} is no table of files"
    names = [file.relative_to(folder).as_posix() for file in files_of(folder)]
    missing = sorted(digests.keys() - set(names))
    if missing:
        return f"{missing[0]} is missing"
    foreign = sorted(set(names) - digests.keys())
    if foreign:
        return f"{foreign[0]} does not belong to it: {MANIFEST} does not name it"
    return _wrong_digest(folder, digests)


def _wrong_digest(folder: Path, digests: dict[str, Any]) -> str | None:
    names = sorted(digests)
    try:
        with ThreadPoolExecutor(THREADS, thread_name_prefix="drl-hash") as pool:
            found = list(pool.map(_digest, (folder / name for name in names)))
    except OSError as error:
        return f"it cannot be read: {error}"
    for name, digest in zip(names, found, strict=True):
        if digest != digests[name]:
            return f"{name} differs from its checksum"
    return None

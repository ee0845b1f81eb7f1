"""Folders of checkpoints: their names, the tracker that names the newest, and what is offered instead.

``checkpoints/iter_0000012`` is the state after 12 iterations. A folder has that name only while it is
whole: it is written as ``.writing-…`` and renamed, and renamed to ``.deleting-…`` before it is removed.
"""

from __future__ import annotations

import os
import re
import shutil
from pathlib import Path

from drl.checkpoint.manifest import damage
from drl.errors import CheckpointError
from drl.observe.files import flush_directory, write_text_atomic

TRACKER = "latest_checkpointed_iteration.txt"
KEPT = "kept.txt"
_NAME = re.compile(r"iter_(\d{7,})")


def folder_name(number: int) -> str:
    """Return the folder name of the state after ``number`` iterations."""
    return f"iter_{number:07d}"


def number_of(folder: Path) -> int | None:
    """Return the iterations of a checkpoint folder by its name, None for other names."""
    found = _NAME.fullmatch(folder.name)
    return int(found[1]) if found else None


def checkpoints_in(root: Path) -> dict[int, Path]:
    """Return the checkpoint folders by iterations done, ascending; whole ones and damaged ones."""
    if not root.is_dir():
        return {}
    numbered = {number_of(path): path for path in root.iterdir() if path.is_dir()}
    return {number: numbered[number] for number in sorted(n for n in numbered if n is not None)}


def writing_folder(final: Path) -> Path:
    """Return where a checkpoint is written until it is whole."""
    return final.with_name(f".writing-{final.name}-{os.getpid()}")


def clear_leftovers(root: Path) -> None:
    """Remove what killed writers left; the lock of the run keeps other writers out."""
    for pattern in (".writing-*", ".deleting-*", ".old-*"):
        for left in root.glob(pattern):
            shutil.rmtree(left, ignore_errors=True)


def replace_folder(beside: Path, final: Path) -> None:
    """Move a finished folder into place; one that is there already moves away first."""
    if final.exists():
        old = final.with_name(f".old-{final.name}-{os.getpid()}")
        final.rename(old)
        beside.rename(final)
        shutil.rmtree(old)
    else:
        beside.rename(final)


def remove_folder(folder: Path) -> None:
    """Delete a checkpoint; one that is half deleted does not have a checkpoint's name."""
    away = folder.with_name(f".deleting-{folder.name}-{os.getpid()}")
    folder.rename(away)
    flush_directory(folder.parent)
    shutil.rmtree(away)


def write_tracker(root: Path, number: int) -> None:
    """Let the tracker name a checkpoint, after its folder's name is on disk."""
    flush_directory(root)
    write_text_atomic(root / TRACKER, f"{number}\n")


def tracked(root: Path) -> int:
    """Return the number in the tracker; CheckpointError when it is missing or nonsense."""
    tracker = root / TRACKER
    if not tracker.is_file():
        raise CheckpointError(
            f"{root}: no checkpoint to resume from ({TRACKER} is missing); start without --resume"
        )
    text = tracker.read_text(errors="replace").strip()
    if not text.isdecimal():
        raise CheckpointError(
            f"{tracker} holds {text[:40]!r} where an iteration number belongs{good(root)}"
        )
    return int(text)


def latest(root: Path) -> Path:
    """Return the newest checkpoint, checked against its manifest; CheckpointError names others."""
    folder = root / folder_name(tracked(root))
    problem = damage(folder)
    if problem:
        raise CheckpointError(f"{folder} cannot be used: {problem}{good(root)}")
    return folder


def good(root: Path) -> str:
    """Name the newest undamaged checkpoint, as the end of a message."""
    for number, folder in reversed(checkpoints_in(root).items()):
        if damage(folder) is None:
            return (
                f"\n{folder.name} is good: write {number} into {root / TRACKER} to resume from it"
            )
    return "\nthere is no good checkpoint beside it: --resume cannot go on here, start a new run"


def read_kept(root: Path) -> dict[str, str]:
    """Return the reasons in ``kept.txt`` by folder name."""
    file = root / KEPT
    lines = file.read_text("utf-8").splitlines() if file.is_file() else []
    parts = [line.partition("  ") for line in lines if line.strip()]
    return {name: reason for name, _, reason in parts}


def write_kept(root: Path, name: str, reason: str) -> None:
    """Add a folder name with its reason; a later reason replaces an earlier one."""
    kept = {other: text for other, text in read_kept(root).items() if other != name}
    kept[name] = " ".join(reason.split())
    lines = [f"{other}  {text}" for other, text in kept.items()]
    write_text_atomic(root / KEPT, "\n".join(lines) + "\n")

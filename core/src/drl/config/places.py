"""What is at a path; a name that no file system takes is nowhere."""

from __future__ import annotations

from pathlib import Path


def is_folder(path: Path) -> bool:
    """True for a folder that can be looked at."""
    try:
        return path.is_dir()
    except (OSError, ValueError):
        return False


def is_file(path: Path) -> bool:
    """True for a file that can be looked at."""
    try:
        return path.is_file()
    except (OSError, ValueError):
        return False

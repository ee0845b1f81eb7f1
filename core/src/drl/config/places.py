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


def file_of(template: Path, **values: object) -> Path:
    """Return the file of a template; only whole ``{name}`` fields are replaced."""
    text = str(template)
    for name, value in values.items():
        text = text.replace(f"{{{name}}}", str(value))
    return Path(text)


def is_blank(path: Path) -> bool:
    """True for a file without a line that holds anything; reads up to the first one that does."""
    try:
        with path.open("rb") as file:
            return not any(line.strip() for line in file)
    except OSError:
        return False

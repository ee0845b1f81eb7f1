"""``RunDirectory``: the one place where a run writes, and the lock that keeps a second writer out.

The lock is an ``flock`` on ``lock``: the kernel drops it with the process, so a killed run never
blocks its own resume. ``lock.json`` beside it only says who holds it, for the message.
"""

from __future__ import annotations

import json
import os
import platform
import re
import shutil
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Self

from filelock import FileLock, Timeout

from drl.errors import BadInput, DrlError, RunDirectoryError
from drl.observe.files import (
    PARTIAL,
    append_json_line,
    flush_directory,
    write_json_atomic,
    write_text_atomic,
)

__all__ = ["RunDirectory", "append_json_line", "write_json_atomic", "write_text_atomic"]

NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.+-]{0,99}")
LEFT = re.compile(rf"\..+(?:{re.escape(PARTIAL)}|\.(?:new|old)-[0-9a-f]{{12}})")
"""Names of files and folders that only exist while something is being replaced."""
MARKS = ("recipe.toml", "metrics.jsonl", "summary.json", "plugins.json", "lock")
BEFORE_START = frozenset({"recipe.toml", "plugins.json", "sync.jsonl", "lock", "lock.json"})
"""What a directory holds of a run without a single figure."""


class RunDirectory:
    """A folder of one run. As a context manager it holds the lock; without, it is for reading.

    ``create`` makes a new one, ``open`` finds an old one. All paths are properties; none of them
    need exist yet. A new one goes again when its run is refused before its first figure (an error with the
    exit code of bad input), so that the mended recipe can have the same folder; with ``only_results``, whatever
    ends the work. ``option``: what a command calls the choice of a folder, when it cannot go on with an old one.
    """

    only_results = False

    def __init__(
        self, path: Path, *, new: bool = False, made: bool = False, option: str | None = None
    ) -> None:
        self.path = path
        self._option = option
        self._new = new
        self._made = made  # and not found, empty
        self._lock = FileLock(path / "lock", timeout=0)

    @classmethod
    def create(
        cls, root: Path, name: str, *, now: float | None = None, option: str | None = None
    ) -> RunDirectory:
        """Make ``root/<name>-<YYYYmmdd-HHMMSS>``; a second run of the same second gets ``-2``, ``-3`` …"""
        if not NAME.fullmatch(name):
            raise RunDirectoryError(
                f"run.name {name!r} cannot name a folder; use up to 100 letters, digits and _ . + -, "
                "not starting with a dot or a dash"
            )
        moment = time.localtime(time.time() if now is None else now)
        stem = f"{name}-{time.strftime('%Y%m%d-%H%M%S', moment)}"
        attempt = 1
        while True:
            path = root / (stem if attempt == 1 else f"{stem}-{attempt}")
            try:
                path.mkdir(parents=True)
            except FileExistsError:
                if not root.is_dir():
                    raise RunDirectoryError(f"{root} is a file; runs need a folder there") from None
                attempt += 1
            except OSError as error:
                raise _unwritable(path, error, option) from error
            else:
                flush_directory(root)
                return cls(path, new=True, made=True, option=option)

    @classmethod
    def create_at(
        cls,
        path: Path,
        *,
        option: str | None = None,
        unfinished: Callable[[Path], bool] = lambda _: False,
    ) -> RunDirectory:
        """Make exactly this folder; one that exists must be empty, or what ``unfinished`` lets be used again."""
        made = not path.exists()
        try:
            path.mkdir(parents=True, exist_ok=True)
            taken = any(path.iterdir())
        except FileExistsError:
            raise RunDirectoryError(f"{path} is a file; a run needs a folder of its own") from None
        except OSError as error:
            raise _unwritable(path, error, option) from error
        if taken and not unfinished(path):
            what = "holds a run already" if is_run_directory(path) else "is not empty"
            advice = "add --resume to go on with it, or name a new folder"
            if option is not None:
                advice = f"name a new folder with {option}"
            raise RunDirectoryError(f"{path} {what}; {advice}")
        return cls(path, new=True, made=made, option=option)

    @classmethod
    def open(cls, path: Path) -> RunDirectory:
        """Find the folder of an earlier run; RunDirectoryError says what lies there instead."""
        if not path.exists():
            raise RunDirectoryError(f"there is no run directory {path}{_newest(path.parent)}")
        if not path.is_dir():
            raise RunDirectoryError(
                f"{path} is a file; name the run directory itself: {path.parent}"
            )
        if not is_run_directory(path):
            inside = is_run_directory(path.parent)
            hint = f"; it lies in the run directory {path.parent}" if inside else _newest(path)
            raise RunDirectoryError(
                f"{path} is not a run directory: it has none of {', '.join(MARKS)}{hint}"
            )
        return cls(path)

    def __enter__(self) -> Self:
        """Take the lock, or raise RunDirectoryError that names its holder."""
        try:
            self._lock.acquire()
        except Timeout:
            raise RunDirectoryError(
                f"{self.path} is in use by {_holder(self.path / 'lock.json')}; "
                "wait for it or end it, or start a run in another folder"
            ) from None
        except OSError as error:
            raise _unwritable(self.path, error, self._option) from error
        clear_leftovers(self.path)  # of a killed writer: nobody else can be writing
        write_json_atomic(self.path / "lock.json", {"pid": os.getpid(), "host": platform.node()})
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        (self.path / "lock.json").unlink(missing_ok=True)
        if self._new and error is not None and (self.only_results or is_refusal(error)):
            self._take_back()
        self._lock.release()

    def _take_back(self) -> None:
        """Remove what was written for a run that never began; files of anybody else stay, and all with them."""
        if {path.name for path in self.path.iterdir()} - BEFORE_START:
            return
        with suppress(OSError):  # the error that ended the run is the one to tell
            for name in BEFORE_START:
                (self.path / name).unlink(missing_ok=True)
            if self._made:
                self.path.rmdir()

    @property
    def name(self) -> str:
        """The folder's own name."""
        return self.path.resolve().name

    @property
    def recipe(self) -> Path:
        """The resolved recipe, itself a valid recipe."""
        return self.path / "recipe.toml"

    @property
    def plugins(self) -> Path:
        """Versions and components, as ``drl.observe.versions`` gathers them."""
        return self.path / "plugins.json"

    @property
    def metrics(self) -> Path:
        """One row of figures per iteration."""
        return self.path / "metrics.jsonl"

    @property
    def sync(self) -> Path:
        """One row per push of weights."""
        return self.path / "sync.jsonl"

    @property
    def summary(self) -> Path:
        """The result of the run."""
        return self.path / "summary.json"

    @property
    def report(self) -> Path:
        """The result for people."""
        return self.path / "report.html"

    @property
    def log(self) -> Path:
        """Lines that a person should read."""
        return self.path / "run.log"

    @property
    def samples(self) -> Path:
        """Folder of pictures: ``before``, ``after`` and one per logged iteration."""
        return self.path / "samples"

    @property
    def checkpoints(self) -> Path:
        """Folder of checkpoints."""
        return self.path / "checkpoints"

    @property
    def adapter(self) -> Path:
        """Folder of the trained adapter in PEFT format."""
        return self.path / "adapter"


def clear_leftovers(path: Path) -> None:
    """Remove what was being written when a process was killed, wherever it lies below ``path``."""
    for left in [found for found in path.rglob(".*") if LEFT.fullmatch(found.name)]:
        if left.is_dir():
            shutil.rmtree(left, ignore_errors=True)
        else:
            left.unlink(missing_ok=True)


def is_refusal(error: BaseException) -> bool:
    """True for what is wrong with the input: nothing ran yet."""
    return isinstance(error, DrlError) and error.exit_code == BadInput.exit_code


def never_began(path: Path) -> bool:
    """True when nothing lies here but what a run writes before its first figure."""
    names = {found.name for found in path.iterdir()}
    return all(name in BEFORE_START or LEFT.fullmatch(name) for name in names)


def is_run_directory(path: Path) -> bool:
    """True when a run has written here."""
    return any((path / mark).is_file() for mark in MARKS)


def _newest(root: Path) -> str:
    """Name the newest run below ``root``, as the end of a message."""
    if not root.is_dir():
        return ""
    runs = [path for path in root.iterdir() if path.is_dir() and is_run_directory(path)]
    if not runs:
        return ""
    return f"; the newest run in {root} is {max(runs, key=lambda path: path.stat().st_mtime)}"


def _holder(path: Path) -> str:
    try:
        facts = json.loads(path.read_text(encoding="utf-8"))
        return f"process {int(facts['pid'])} on {facts['host']}"
    except (OSError, ValueError, KeyError, TypeError):
        return "another process"


def _unwritable(path: Path, error: OSError, option: str | None) -> RunDirectoryError:
    reason = error.strerror or str(error)
    return RunDirectoryError(
        f"cannot write in {path}: {reason}; choose another folder with {option or '--run-dir'}"
    )

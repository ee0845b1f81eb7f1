"""One save at a time beside the training: begun by the driver, finished in a thread, settled later."""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from drl.checkpoint.adapters import write_adapters
from drl.checkpoint.folders import (
    clear_leftovers,
    number_of,
    replace_folder,
    write_tracker,
    writing_folder,
)
from drl.checkpoint.keeper import in_background
from drl.checkpoint.manifest import write_manifest
from drl.checkpoint.meta import add_to_meta
from drl.checkpoint.retention import Retention, prune
from drl.errors import DrlError
from drl.lora import AdapterSnapshot, LoraError
from drl.observe.files import write_text_atomic

RUN_STATE = "run.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class Save:
    """What becomes a checkpoint once the trainer has written its part.

    ``state``: text of ``run.json``. ``base``: describes the base model, computed in the background.
    """

    final: Path
    state: str
    base: Callable[[], Mapping[str, Any]]
    adapters: Mapping[str, AdapterSnapshot]
    adapter_folder: Path
    base_model: str
    retention: Retention

    @property
    def beside(self) -> Path:
        """Where it is written until it is whole."""
        return writing_folder(self.final)

    def open(self) -> None:
        """Make the folder to write into; what killed writers left is cleared away."""
        self.final.parent.mkdir(parents=True, exist_ok=True)
        clear_leftovers(self.final.parent)
        self.beside.mkdir()

    def drop(self) -> None:
        """Remove what is not whole."""
        shutil.rmtree(self.beside, ignore_errors=True)

    def finish(self) -> list[str]:
        """Complete the folder, let it appear, let the tracker name it; return what retention deleted."""
        root, beside = self.final.parent, self.beside
        add_to_meta(beside, {"base": self.base()})
        write_text_atomic(beside / RUN_STATE, self.state)
        write_manifest(beside)
        replace_folder(beside, self.final)
        number = number_of(self.final)
        assert number is not None
        write_tracker(root, number)
        removed = prune(root, self.retention)
        try:
            write_adapters(self.adapters, self.adapter_folder, base_model=self.base_model)
        except LoraError as error:
            raise DrlError(
                f"checkpoint {self.final.name} is in place, but not the adapter beside it: {error}"
            ) from error
        return removed


@dataclass(frozen=True, slots=True, kw_only=True)
class Finished:
    """A save that is complete. ``seconds``: how long it was written in the background."""

    final: Path
    seconds: float
    removed: tuple[str, ...]


class Saver:
    """Knows the save that is under way, if any."""

    def __init__(self) -> None:
        self._save: Save | None = None
        self._future: Future[None] | None = None
        self._result: Finished | None = None

    @property
    def current(self) -> Path | None:
        """The checkpoint that is being written."""
        return None if self._save is None else self._save.final

    def begin(self, save: Save, written: Future[None]) -> None:
        """Finish a save in the background, when the trainer's part is written."""
        began = time.perf_counter()

        def finish() -> None:
            try:
                written.result()
                removed = save.finish()
            except BaseException:
                save.drop()
                raise
            seconds = time.perf_counter() - began
            self._result = Finished(final=save.final, seconds=seconds, removed=tuple(removed))

        self._save = save
        self._future = in_background(finish)

    def take(self, *, wait: bool) -> Finished | None:
        """Return the save that is complete, once; None when there is none. Raises what went wrong in it.

        ``wait``: until the one under way has ended.
        """
        if self._future is None or not (wait or self._future.done()):
            return None
        error = self._future.exception()  # waits; an interrupt leaves the save under way
        self._future, self._save = None, None
        if error is not None:
            raise error
        result, self._result = self._result, None
        return result

"""``ImageFolderSource``: pictures of a folder with their captions, for supervised training."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from drl.builtin.config_data import ImageFolderOptions
from drl.errors import DataError
from drl.interfaces.data import DataSource
from drl.mathematics.epochs import EpochCursor, shuffled
from drl.media.images import ENDINGS
from drl.types import Context, MediaFile, Prompt

CAPTIONS = "metadata.jsonl"

log = logging.getLogger(__name__)


class ImageFolderSource(DataSource):
    """One row per picture below a folder, sorted by path, which are not decoded here.

    The caption is ``NAME.txt`` beside the picture, or a line of metadata.jsonl in its folder or one above.
    Folders whose name begins with a dot are left out. ``skipped`` holds the pictures without a caption.
    """

    def __init__(self, options: ImageFolderOptions, context: Context) -> None:
        super().__init__(options, context)
        self.folder = Path(options.path)
        skip = context.section.on_broken_row == "skip"
        found = picture_names(self.folder)
        self.captions = captions_of(self.folder, found, skip_broken=skip)
        self.names = [name for name in found if name in self.captions]
        self.skipped = tuple(name for name in found if name not in self.captions)
        rows = len(self.names)
        order_of = shuffled(context, "data_shuffle", rows) if options.shuffle else None
        self.cursor = EpochCursor(rows, order_of or (lambda epoch: range(rows)))

    def take(self, count: int) -> list[Prompt]:
        """Return the next pictures, as files, with their captions."""
        return [self._prompt(*self.cursor.next()) for _ in range(count)]

    def rows(self) -> int:
        """Return the number of pictures."""
        return len(self.names)

    def state(self) -> dict[str, Any]:
        """Return the position and the names it refers to."""
        return {**self.cursor.state(), "files": list(self.names)}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go to a saved position; DataError when the folder holds other pictures now."""
        if state["files"] != self.names:
            raise DataError(
                f"data.image_folder.path: {self.folder} holds other pictures than at the save; "
                "give the folder of that run, or start a new run"
            )
        self.cursor.restore(state)

    def _prompt(self, row: int, epoch: int) -> Prompt:
        name = self.names[row]
        return Prompt(
            row=row,
            text=self.captions[name],
            epoch=epoch,
            metadata={"file": name},
            media=MediaFile(root=self.folder, name=name),
        )


def picture_names(folder: Path) -> list[str]:
    """Return the pictures below a folder as paths from it, sorted; DataError when there is none."""
    if not folder.is_dir():
        raise DataError(f"data.image_folder.path: there is no folder {folder}")
    names = sorted(
        file.relative_to(folder).as_posix()
        for file in visible(folder, "*")
        if file.suffix.lower() in ENDINGS
    )
    if not names:
        raise DataError(
            f"data.image_folder.path: {folder} holds no picture ({', '.join(sorted(ENDINGS))})"
        )
    return names


def visible(folder: Path, pattern: str) -> list[Path]:
    """Return the files below a folder, sorted, without those that are hidden or in a hidden folder."""
    return [
        file
        for file in sorted(folder.rglob(pattern))
        if file.is_file()
        and not any(part.startswith(".") for part in file.relative_to(folder).parts)
    ]


def captions_of(folder: Path, names: list[str], *, skip_broken: bool) -> dict[str, str]:
    """Return the caption of every picture; DataError names those that have none, unless they are skipped."""
    captions: dict[str, str] = {}
    for file in visible(folder, CAPTIONS):  # the deeper ones come later, and win
        captions |= listed_captions(folder, file, skip_broken=skip_broken)
    for name in names:
        beside = (folder / name).with_suffix(".txt")
        if beside.is_file():
            captions[name] = caption_in(beside)
    missing = [name for name in names if not captions.get(name)]
    if missing and not (skip_broken and len(missing) < len(names)):
        raise DataError(
            f"{folder}: {len(missing)} pictures have no caption, such as {missing[:3]}; write NAME.txt "
            f'beside each, or a line {{"file_name": …, "text": …}} into {CAPTIONS}'
        )
    if missing:
        log.warning(
            "%s: %d pictures have no caption, such as %s; they are skipped",
            folder,
            len(missing),
            missing[:3],
        )
    return {name: captions[name] for name in names if captions.get(name)}


def caption_in(file: Path) -> str:
    """Return the text of a caption file; DataError when it is not UTF-8."""
    try:
        return file.read_text(encoding="utf-8").strip()
    except UnicodeDecodeError as error:
        raise DataError(f"{file}: is not UTF-8 ({error}); save it as UTF-8") from error


def listed_captions(folder: Path, file: Path, *, skip_broken: bool) -> dict[str, str]:
    """Return the captions of a metadata.jsonl by path from ``folder``; DataError names the broken lines."""
    captions, broken = {}, []
    place = file.parent.relative_to(folder)
    for number, line in enumerate(file.read_bytes().split(b"\n"), start=1):
        if not line.strip():
            continue
        try:
            row = json.loads(line.decode("utf-8"))
            captions[(place / str(row["file_name"])).as_posix()] = str(row["text"]).strip()
        except (ValueError, KeyError, TypeError, RecursionError):
            broken.append(number)
    if broken and not skip_broken:
        raise DataError(
            f"{file}: lines {broken[:10]} are no JSON objects with file_name and text; correct them"
        )
    if broken:
        log.warning(
            "%s: lines %s are skipped: no JSON objects with file_name and text", file, broken
        )
    return captions

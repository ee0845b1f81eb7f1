"""``ImageFolderSource``: pictures of a folder with their captions, for supervised training."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image

from drl.builtin.config_data import ImageFolderOptions
from drl.errors import DataError
from drl.interfaces.data import DataSource
from drl.mathematics.epochs import EpochCursor, shuffled
from drl.types import Context, Media, Prompt

PICTURES = frozenset({".bmp", ".jpeg", ".jpg", ".png", ".webp"})
CAPTIONS = "metadata.jsonl"


class ImageFolderSource(DataSource):
    """One row per picture, sorted by name; the caption is ``NAME.txt`` or a line of metadata.jsonl."""

    def __init__(self, options: ImageFolderOptions, context: Context) -> None:
        super().__init__(options, context)
        self.folder = Path(options.path)
        self.files = picture_files(self.folder)
        self.captions = captions_of(self.folder, self.files)
        rows = len(self.files)
        order_of = shuffled(context, "data_shuffle", rows) if options.shuffle else None
        self.cursor = EpochCursor(rows, order_of or (lambda epoch: range(rows)))

    def take(self, count: int) -> list[Prompt]:
        """Return the next pictures, ``(3, 1, H, W)`` float32 in [0, 1], with their captions."""
        return [self._prompt(*self.cursor.next()) for _ in range(count)]

    def rows(self) -> int:
        """Return the number of pictures."""
        return len(self.files)

    def state(self) -> dict[str, Any]:
        """Return the position and the names it refers to."""
        return {**self.cursor.state(), "files": [file.name for file in self.files]}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go to a saved position; DataError when the folder holds other pictures now."""
        if state["files"] != [file.name for file in self.files]:
            raise DataError(
                f"data.image_folder.path: {self.folder} holds other pictures than at the save; "
                "give the folder of that run, or start a new run"
            )
        self.cursor.restore(state)

    def _prompt(self, row: int, epoch: int) -> Prompt:
        file = self.files[row]
        return Prompt(
            row=row,
            text=self.captions[file.name],
            epoch=epoch,
            metadata={"file": file.name},
            media=Media(pixels=read_pixels(file)),
        )


def picture_files(folder: Path) -> list[Path]:
    """Return the pictures of a folder by name; DataError when there is none."""
    if not folder.is_dir():
        raise DataError(f"data.image_folder.path: there is no folder {folder}")
    files = sorted(file for file in folder.iterdir() if file.suffix.lower() in PICTURES)
    if not files:
        raise DataError(
            f"data.image_folder.path: {folder} holds no picture ({', '.join(sorted(PICTURES))})"
        )
    return files


def captions_of(folder: Path, files: list[Path]) -> dict[str, str]:
    """Return the caption of every picture; DataError names those that have none."""
    captions = listed_captions(folder / CAPTIONS)
    for file in files:
        beside = file.with_suffix(".txt")
        if beside.is_file():
            captions[file.name] = beside.read_text(encoding="utf-8").strip()
    missing = [file.name for file in files if not captions.get(file.name)]
    if missing:
        raise DataError(
            f"{folder}: {len(missing)} pictures have no caption, such as {missing[:3]}; write NAME.txt "
            f'beside each, or a line {{"file_name": …, "text": …}} into {CAPTIONS}'
        )
    return captions


def listed_captions(file: Path) -> dict[str, str]:
    """Read metadata.jsonl, when there is one; DataError names the broken lines."""
    if not file.is_file():
        return {}
    captions, broken = {}, []
    for number, line in enumerate(file.read_text(encoding="utf-8").splitlines(), start=1):
        try:
            row = json.loads(line)
            captions[str(row["file_name"])] = str(row["text"]).strip()
        except (ValueError, KeyError, TypeError):
            broken.append(number)
    if broken:
        raise DataError(
            f"{file}: lines {broken[:10]} are no JSON objects with file_name and text; correct them"
        )
    return captions


def read_pixels(file: Path) -> torch.Tensor:
    """Return ``(3, 1, H, W)`` float32 in [0, 1]; DataError when the file is no picture."""
    try:
        with Image.open(file) as image:
            values = np.array(image.convert("RGB"))
    except (OSError, ValueError, SyntaxError, Image.DecompressionBombError) as error:
        raise DataError(
            f"{file}: cannot be read as a picture ({error}); remove or replace it"
        ) from error
    return torch.from_numpy(values).permute(2, 0, 1)[:, None].float() / 255.0

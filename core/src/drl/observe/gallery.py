"""Pictures inside the report: pairs of the same seed before and after, and the newest rollout's samples.

Only files that ``samples.json`` names are read, and only from its own folder. Small pictures go in
pixel by pixel as PNG and are enlarged by the browser; large ones as JPEG of at most 256 a side.
"""

from __future__ import annotations

import base64
import io
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from PIL import Image

from drl.observe.files import number
from drl.observe.pictures import INDEX, SMALL_SIDE, zoom

MOST_PAIRS = 24
MOST_SAMPLES = 16
MOST_BYTES = 900_000
BEFORE, AFTER = "before", "after"


@dataclass(frozen=True, slots=True, kw_only=True)
class Picture:
    """One embedded picture with the size it is shown at."""

    uri: str
    width: int
    height: int
    prompt: str
    seed: int | None
    reward: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Gallery:
    """What the report shows. ``total``: number of pairs there are; ``newest``: name of the sample folder."""

    pairs: tuple[tuple[Picture, Picture], ...] = ()
    total: int = 0
    newest: str = ""
    samples: tuple[Picture, ...] = ()
    remarks: tuple[str, ...] = ()


class _Embedder:
    """Turns files into pictures until the report would grow too large."""

    def __init__(self) -> None:
        self.room = MOST_BYTES
        self.remarks: list[str] = []

    def picture(self, folder: Path, entry: Mapping[str, Any]) -> Picture | None:
        """Return the picture of one index entry, or None with a remark."""
        file = entry.get("file")
        if not isinstance(file, str) or Path(file).name != file:
            self.remarks.append(f"samples/{folder.name}/{INDEX} names a file outside its folder")
            return None
        try:
            with Image.open(folder / file) as image:
                image.load()
                uri, shown = _data_uri(image)
        except (OSError, ValueError, SyntaxError, Image.DecompressionBombError):
            self.remarks.append(f"samples/{folder.name}/{file} is absent or no picture")
            return None
        self.room -= len(uri)
        seed = entry.get("seed")
        return Picture(
            uri=uri,
            width=shown.width,
            height=shown.height,
            prompt=str(entry.get("prompt", "")),
            seed=seed if isinstance(seed, int) else None,
            reward=number(entry.get("reward")),
        )


def load_gallery(samples: Path) -> Gallery:
    """Read what lies in the run's sample folder; what is absent or broken becomes a remark."""
    embedder = _Embedder()
    matched = _matched(samples, embedder)
    pairs = []
    for old, new in _spread_out(matched, MOST_PAIRS):
        if embedder.room < 0:
            break
        before, after = (
            embedder.picture(samples / BEFORE, old),
            embedder.picture(samples / AFTER, new),
        )
        if before is not None and after is not None:
            pairs.append((before, after))
    newest = _newest(samples)
    rollout = []
    for entry in _entries(newest, embedder)[:MOST_SAMPLES] if newest is not None else []:
        if embedder.room < 0:
            break
        picture = embedder.picture(newest, entry) if newest is not None else None
        rollout += [picture] if picture is not None else []
    return Gallery(
        pairs=tuple(pairs),
        total=len(matched),
        newest=newest.name if newest is not None else "",
        samples=tuple(rollout),
        remarks=tuple(embedder.remarks),
    )


def _matched(
    samples: Path, embedder: _Embedder
) -> list[tuple[Mapping[str, Any], Mapping[str, Any]]]:
    """Pair entries by data row and seed: the same noise, whatever the order of the files."""
    missing = [name for name in (BEFORE, AFTER) if not (samples / name / INDEX).is_file()]
    if missing:
        embedder.remarks += [f"samples/{name}/{INDEX} is absent" for name in missing]
        return []
    old, new = _entries(samples / BEFORE, embedder), _entries(samples / AFTER, embedder)
    by_key = {(str(entry.get("row")), str(entry.get("seed"))): entry for entry in new}
    keyed = [(entry, (str(entry.get("row")), str(entry.get("seed")))) for entry in old]
    return [(entry, by_key[key]) for entry, key in keyed if key in by_key]


def _entries(folder: Path, embedder: _Embedder) -> list[Mapping[str, Any]]:
    try:
        index = json.loads((folder / INDEX).read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        index = None
    if not isinstance(index, list):
        embedder.remarks.append(f"samples/{folder.name}/{INDEX} is no list of samples")
        return []
    return [entry for entry in index if isinstance(entry, dict)]


def _newest(samples: Path) -> Path | None:
    """Return the sample folder of the last iteration, by name."""
    if not samples.is_dir():
        return None
    folders = [path for path in samples.iterdir() if (path / INDEX).is_file()]
    rollouts = [path for path in folders if path.name not in (BEFORE, AFTER)]
    return max(rollouts, key=lambda path: (len(path.name), path.name), default=None)


def _spread_out(items: Sequence[Any], most: int) -> list[Any]:
    """Take every n-th, so that the choice is fixed by the order of the data and by nothing else."""
    if len(items) <= most:
        return list(items)
    return [items[len(items) * number // most] for number in range(most)]


def _data_uri(image: Image.Image) -> tuple[str, Image.Image]:
    shown = zoom(image)
    buffer = io.BytesIO()
    if max(image.size) <= SMALL_SIDE:
        mode = image.mode if image.mode in ("L", "RGB", "RGBA") else "RGB"
        image.convert(mode).save(buffer, "PNG", optimize=True)
        kind = "png"
    else:
        shown.convert("RGB").save(buffer, "JPEG", quality=85, optimize=True)
        kind = "jpeg"
    return f"data:image/{kind};base64,{base64.b64encode(buffer.getvalue()).decode('ascii')}", shown

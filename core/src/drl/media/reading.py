"""``MediaFile`` to ``Media`` of the recipe's size, and what can be said of a file before it is decoded."""

from __future__ import annotations

from hashlib import sha256
from typing import TYPE_CHECKING

import torch

from drl.media.broken import BrokenMedia
from drl.media.fit import Target, fitted_bytes
from drl.media.images import ENDINGS, check_image, read_image
from drl.media.videos import check_video, read_video
from drl.types import Media

if TYPE_CHECKING:
    from drl.types import MediaFile


def read_media(file: MediaFile, target: Target) -> Media:
    """Return ``(3, F, H, W)`` float32 in steps of 1/255; BrokenMedia says why the file cannot be used."""
    check_kind(file, target)
    if file.kind == "video":
        frames, fps = read_video(file, target)
        return Media(pixels=as_floats(frames.transpose(0, 1)), kind="video", fps=fps)
    image = torch.from_numpy(read_image(file))
    pixels = fitted_bytes(image, target.height, target.width)
    return Media(pixels=as_floats(pixels[:, None]))


def as_floats(pixels: torch.Tensor) -> torch.Tensor:
    """Return uint8 pixels as contiguous float32 in [0, 1]."""
    return pixels.contiguous().float() / 255.0


def check_media(file: MediaFile, target: Target) -> None:
    """Raise BrokenMedia for what shows without decoding: no such file, another format, too few frames."""
    check_kind(file, target)
    if file.content is None and not file.path.is_file():
        state = "is not a file" if file.path.exists() else "does not exist"
        raise BrokenMedia(f"{file.name}: {state} in {file.root}")
    if file.kind == "video":
        check_video(file, target)
    else:
        check_image(file)


def check_kind(file: MediaFile, target: Target) -> None:
    """Raise BrokenMedia for an image where a recipe wants several frames, and for another ending."""
    if file.kind == "video":
        return
    if target.frames != 1:
        raise BrokenMedia(
            f"{file.name}: is an image, but sampling.num_frames is {target.frames}; images need 1"
        )
    if file.content is None and file.path.suffix.lower() not in ENDINGS:
        raise BrokenMedia(f"{file.name}: is no image ({', '.join(sorted(ENDINGS))})")


def version_of(file: MediaFile) -> str:
    """Return what changes when the file does, without reading it; BrokenMedia when it is not there."""
    if file.version is not None:
        return file.version
    try:
        facts = file.path.stat()
    except (OSError, ValueError) as error:
        raise BrokenMedia(f"{file.name}: does not exist in {file.root}") from error
    return f"{facts.st_size}-{facts.st_mtime_ns}"


def content_digest(file: MediaFile) -> str:
    """Return the SHA-256 (hex) of the file's bytes."""
    digest = sha256(file.content or b"")
    if file.content is None:
        with file.path.open("rb") as handle:
            while chunk := handle.read(1 << 20):
                digest.update(chunk)
    return digest.hexdigest()

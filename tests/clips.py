"""Short real videos whose frame n is a flat grey of a level known for n."""

from __future__ import annotations

import struct
from collections.abc import Mapping
from fractions import Fraction
from pathlib import Path

import numpy as np

from drl.types import MediaFile

STEP = 6
"""Grey levels between two frames; decoding is off by one or two."""


def level(number: int) -> int:
    """Return the grey of a frame."""
    return 8 + STEP * number


def write_clip(
    path: Path,
    frames: int,
    *,
    size: tuple[int, int] = (32, 16),
    rate: Fraction | int = 8,
    codec: str = "libx264",
    gop: int = 12,
    options: Mapping[str, str] | None = None,
    rotated: bool = False,
) -> MediaFile:
    """Write ``frames`` frames of ``size`` (width, height); the left half of each is 8 levels brighter."""
    import av

    path.parent.mkdir(parents=True, exist_ok=True)
    with av.open(str(path), "w") as container:
        stream = container.add_stream(codec, rate=rate)
        stream.width, stream.height = size
        stream.pix_fmt, stream.gop_size = "yuv420p", gop
        stream.options = dict(options or {})
        for number in range(frames):
            pixels = np.full((size[1], size[0], 3), level(number), np.uint8)
            pixels[:, : size[0] // 2] += 8
            for packet in stream.encode(av.VideoFrame.from_ndarray(pixels, format="rgb24")):
                container.mux(packet)
        for packet in stream.encode():
            container.mux(packet)
    if rotated:
        turn_clockwise(path)
    return MediaFile(root=path.parent, name=path.name, kind="video")


def turn_clockwise(path: Path) -> None:
    """Say in the header of an MP4 that it is to be shown turned by 90 degrees, as phones do."""
    content = bytearray(path.read_bytes())
    track = content.index(b"tkhd") + 4
    matrix = struct.pack(">9i", 0, 1 << 16, 0, -(1 << 16), 0, 0, 0, 0, 1 << 30)
    place = track + 40  # version and flags 4, times and ids 20, reserved 8, layer to volume 8
    content[place : place + 36] = matrix
    path.write_bytes(content)

"""The frames of a video that a recipe uses, by PyAV (``drl-core[video]``); no other program is started.

Only the frames from the key frame before the first used one are decoded, and each used one is brought to
its size at once, so that a long video in a high resolution is never held whole.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from io import BytesIO
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from drl.errors import DataError
from drl.media.broken import BrokenMedia
from drl.media.fit import Target, fitted_bytes

if TYPE_CHECKING:
    from torch import Tensor

    from drl.types import MediaFile

OPENING = {
    # a playlist or a list of parts could name any file of this machine or of another
    "format_whitelist": "avi,matroska,webm,mov,mp4,m4a,3gp,3g2,mj2,mpeg,mpegts,ogg,flv,asf",
    "protocol_whitelist": "file",
}


def check_reader() -> None:
    """Raise DataError when PyAV is not installed."""
    if find_spec("av") is None:
        raise DataError(
            "reading videos needs PyAV, which is not installed; "
            "install it with: pip install 'drl-core[video]'"
        )


def check_video(file: MediaFile, target: Target) -> None:
    """Raise BrokenMedia when the file's head is no video's or tells of too few frames; decodes nothing."""
    with opened(file) as (_, stream):
        if stream.frames:
            check_length(file, stream.frames, target)


def check_length(file: MediaFile, total: int, target: Target) -> None:
    """Raise BrokenMedia when a video has fewer frames than the recipe takes."""
    if total < target.span:
        stride = f" at data.sft_frame_stride = {target.stride}" if target.stride > 1 else ""
        raise BrokenMedia(
            f"{file.name}: has {total} frames, but sampling.num_frames = {target.frames}{stride} "
            f"needs {target.span}"
        )


def read_video(file: MediaFile, target: Target) -> tuple[Tensor, float | None]:
    """Return ``(F, 3, H, W)`` uint8 and the frames per second that they stand for, None if not told."""
    times = presentation_times(file)
    frames = None
    if times is not None:
        check_length(file, len(times), target)
        frames = frames_at(file, [times[number] for number in target.chosen(len(times))], target)
    if frames is None:
        frames = frames_by_count(file, target)
    with opened(file) as (_, stream):
        rate = stream.average_rate
    return torch.stack(frames), float(rate) / target.stride if rate else None


def presentation_times(file: MediaFile) -> list[int] | None:
    """Return when each frame is shown, in order, without decoding; None where the file does not say."""
    with opened(file) as (container, stream):
        times = [
            packet.pts
            for packet in container.demux(stream)
            if packet.size and not packet.is_discard
        ]
    told = [time for time in times if time is not None]
    return sorted(told) if told and len(set(told)) == len(times) else None


def frames_at(file: MediaFile, times: list[int], target: Target) -> list[Tensor] | None:
    """Return the frames shown at these times; None when the file turns out not to hold them so."""
    wanted = set(times)
    found: dict[int, Tensor] = {}
    with opened(file) as (container, stream):
        container.seek(times[0], stream=stream, backward=True)
        for number, frame in enumerate(container.decode(stream)):
            if number == 0 and (frame.pts is None or frame.pts > times[0]):
                return None  # the index led behind the first used frame
            if frame.pts in wanted and not frame.is_corrupt:
                found[frame.pts] = upright(frame, target)
            if len(found) == len(wanted):
                break
    return [found[time] for time in times] if len(found) == len(times) else None


def frames_by_count(file: MediaFile, target: Target) -> list[Tensor]:
    """Return the used frames by decoding the file from its beginning, twice: to count, and to pick."""
    with opened(file) as (container, stream):
        total = sum(1 for _ in container.decode(stream))
    check_length(file, total, target)
    wanted = target.chosen(total)
    found = []
    with opened(file) as (container, stream):
        for number, frame in enumerate(container.decode(stream)):
            if number in wanted:
                found.append(upright(frame, target))
            if number == wanted[-1]:
                break
    return found


def upright(frame: Any, target: Target) -> Tensor:
    """Return a decoded frame as ``(3, H, W)`` uint8, turned as the file says it is to be shown."""
    pixels = frame.to_ndarray(format="rgb24")
    turned = np.rot90(pixels, round(frame.rotation / 90) % 4)
    return fitted_bytes(torch.from_numpy(np.ascontiguousarray(turned)), target.height, target.width)


@contextmanager
def opened(file: MediaFile) -> Iterator[tuple[Any, Any]]:
    """Open a file and its first video stream; whatever its decoder raises becomes BrokenMedia."""
    check_reader()
    import av

    source = f"file:{file.path}" if file.content is None else BytesIO(file.content)
    try:
        with av.open(source, options=OPENING) as container:
            if not container.streams.video:
                raise BrokenMedia(f"{file.name}: has no video stream")
            yield container, container.streams.video[0]
    except (av.FFmpegError, OSError, ValueError) as error:
        if isinstance(error, BrokenMedia):
            raise
        raise BrokenMedia(f"{file.name}: cannot be read as a video ({error})") from error

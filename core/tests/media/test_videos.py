"""Frames of real videos: the right ones, at the right size, and errors that name the file."""

from __future__ import annotations

import tracemalloc
from fractions import Fraction
from pathlib import Path

import pytest
import torch

pytest.importorskip("av", reason="videos are read by PyAV")

from clips import level, write_clip

from drl.errors import DataError
from drl.media import videos
from drl.media.broken import BrokenMedia
from drl.media.fit import Target
from drl.media.reading import read_media
from drl.media.videos import check_video, frames_at, frames_by_count, presentation_times, read_video
from drl.types import MediaFile


def numbers(frames: torch.Tensor) -> list[int]:
    """Return which frame each is, told by its grey."""
    right = frames[:, :, :, frames.shape[3] * 3 // 4 :].float().mean((1, 2, 3))
    return [round((float(value) - level(0)) / (level(1) - level(0))) for value in right]


def target(frames: int = 5, stride: int = 1, height: int = 16, width: int = 32) -> Target:
    return Target(height=height, width=width, frames=frames, stride=stride)


@pytest.mark.parametrize(
    ("name", "codec", "options"),
    [
        ("a.mp4", "libx264", {}),
        ("open.mp4", "libx264", {"x264-params": "open-gop=1:keyint=6:bframes=3"}),
        ("a.mkv", "libx264", {}),
        ("a.avi", "mpeg4", {"b": "4M"}),
        ("a.webm", "libvpx-vp9", {}),
        ("a.ts", "libx264", {}),
    ],
)
def test_the_frames_of_the_middle_come_out_of_every_container(
    tmp_path: Path, name: str, codec: str, options: dict[str, str]
) -> None:
    file = write_clip(tmp_path / name, 38, codec=codec, options=options)
    for wanted, expected in [
        (target(5, 4), [10, 14, 18, 22, 26]),
        (target(1), [18]),
        (target(38), list(range(38))),
    ]:
        check_video(file, wanted)
        frames, fps = read_video(file, wanted)
        assert (frames.shape, frames.dtype) == ((wanted.frames, 3, 16, 32), torch.uint8)
        assert numbers(frames) == expected
        assert fps == 8 / wanted.stride


def test_seeking_and_counting_give_the_same_frames(tmp_path: Path) -> None:
    file = write_clip(tmp_path / "a.mp4", 30, gop=6)
    times = presentation_times(file)
    assert times is not None
    assert len(times) == 30
    assert times == sorted(times)
    wanted = target(4, 3)
    sought = frames_at(file, [times[number] for number in wanted.chosen(30)], wanted)
    assert sought is not None
    counted = frames_by_count(file, wanted)
    assert all(torch.equal(one, other) for one, other in zip(sought, counted, strict=True))


def test_times_that_the_file_does_not_hold_are_not_made_up(tmp_path: Path) -> None:
    file = write_clip(tmp_path / "a.mp4", 10)
    times = presentation_times(file)
    assert times is not None
    assert frames_at(file, [times[3], times[3] + 1], target(2)) is None


@pytest.mark.parametrize(
    ("frames", "stride", "words"),
    [
        (11, 1, "has 10 frames, but sampling.num_frames = 11 needs 11"),
        (4, 4, "has 10 frames, but sampling.num_frames = 4 at data.sft_frame_stride = 4 needs 13"),
    ],
)
def test_too_few_frames_are_told_with_what_is_needed(
    tmp_path: Path, frames: int, stride: int, words: str
) -> None:
    file = write_clip(tmp_path / "a.mp4", 10)
    for reading in (check_video, read_video):
        with pytest.raises(BrokenMedia, match=f"a.mp4: {words}"):
            reading(file, target(frames, stride))
    assert read_video(file, target(4, 3))[0].shape[0] == 4


def test_a_file_without_times_is_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = write_clip(tmp_path / "a.mp4", 10)
    monkeypatch.setattr(videos, "presentation_times", lambda file: None)
    assert numbers(read_video(file, target(4, 2))[0]) == [1, 3, 5, 7]
    with pytest.raises(BrokenMedia, match=r"has 10 frames, .* needs 11"):
        read_video(file, target(11))


@pytest.mark.parametrize("rate", [Fraction(30000, 1001), 25])
def test_frames_per_second_are_those_of_the_used_frames(tmp_path: Path, rate: Fraction) -> None:
    file = write_clip(tmp_path / "a.mp4", 10, rate=rate)
    media = read_media(file, target(5, 2))
    assert media.fps == pytest.approx(float(rate) / 2)
    assert (media.kind, tuple(media.pixels.shape)) == ("video", (3, 5, 16, 32))
    assert media.pixels.dtype == torch.float32
    assert 0 <= media.pixels.min() <= media.pixels.max() <= 1


def test_frames_are_scaled_to_cover_and_cropped(tmp_path: Path) -> None:
    file = write_clip(tmp_path / "a.mp4", 5, size=(64, 32))
    frames, _ = read_video(file, target(5, height=8, width=8))
    assert frames.shape == (5, 3, 8, 8)
    left, right = frames[..., :4].float().mean(), frames[..., 4:].float().mean()
    assert float(left - right) == pytest.approx(8, abs=3)  # the edge is still in the middle


def test_a_clip_of_a_phone_is_shown_upright(tmp_path: Path) -> None:
    file = write_clip(tmp_path / "a.mp4", 5, size=(64, 32), rotated=True)
    frames, _ = read_video(file, target(1, height=64, width=32))
    assert frames.shape == (1, 3, 64, 32)
    top, bottom = frames[..., :32, :].float().mean(), frames[..., 32:, :].float().mean()
    assert float(top - bottom) == pytest.approx(8, abs=3)  # what was left is up now


def test_bytes_inside_a_larger_file_are_read_like_a_file(tmp_path: Path) -> None:
    file = write_clip(tmp_path / "a.mp4", 10)
    inside = MediaFile(
        root=tmp_path, name="0", kind="video", content=file.path.read_bytes(), version="1"
    )
    assert torch.equal(read_video(inside, target(3, 2))[0], read_video(file, target(3, 2))[0])


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("list.ffconcat", "ffconcat version 1.0\nfile a.mp4\n"),
        ("list.mp4", "ffconcat version 1.0\nfile a.mp4\n"),
        ("list.m3u8", "#EXTM3U\n#EXT-X-TARGETDURATION:4\n#EXTINF:4,\na.mp4\n#EXT-X-ENDLIST\n"),
        ("empty.mp4", ""),
        ("words.mp4", "no video\n" * 100),
    ],
)
def test_lists_of_other_files_and_what_is_no_video_are_refused(
    tmp_path: Path, name: str, text: str
) -> None:
    write_clip(tmp_path / "a.mp4", 5)
    (tmp_path / name).write_text(text)
    file = MediaFile(root=tmp_path, name=name, kind="video")
    with pytest.raises(BrokenMedia, match=rf"^{name}: cannot be read as a video \("):
        read_video(file, target(1))


def test_a_torn_video_is_named(tmp_path: Path) -> None:
    file = write_clip(tmp_path / "a.mkv", 30, size=(64, 64))
    content = file.path.read_bytes()
    file.path.write_bytes(content[: len(content) // 2])
    with pytest.raises(BrokenMedia, match=r"^a\.mkv: (has|cannot)"):
        read_video(file, target(30))


def test_a_file_without_pictures_is_named(tmp_path: Path) -> None:
    import av
    import numpy as np

    path = tmp_path / "a.mkv"
    with av.open(str(path), "w") as container:
        stream = container.add_stream("aac", rate=8000)
        sound = av.AudioFrame.from_ndarray(
            np.zeros((1, 1024), np.float32), format="fltp", layout="mono"
        )
        sound.sample_rate = 8000
        for packet in [*stream.encode(sound), *stream.encode()]:
            container.mux(packet)
    with pytest.raises(BrokenMedia, match=r"a\.mkv: has no video stream"):
        check_video(MediaFile(root=tmp_path, name="a.mkv", kind="video"), target())


def test_a_large_video_is_never_held_whole(tmp_path: Path) -> None:
    file = write_clip(tmp_path / "a.mp4", 36, size=(960, 540), gop=4)
    frame = 960 * 540 * 3
    tracemalloc.start()
    frames, _ = read_video(file, target(12, 3, height=16, width=16))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert numbers(frames) == list(range(1, 36, 3))
    assert peak < 4 * frame


def test_without_the_reader_the_package_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = write_clip(tmp_path / "a.mp4", 5)
    monkeypatch.setattr(videos, "find_spec", lambda name: None)
    with pytest.raises(DataError, match=r"needs PyAV.*\n?.*pip install 'drl-core\[video\]'"):
        read_video(file, target(1))

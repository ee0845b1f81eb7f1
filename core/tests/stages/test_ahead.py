"""Before the first iteration: broken rows are listed with their numbers, the rest is encoded with progress."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from clips import write_clip
from encoding_runs import Settings, encoding_run, image_rows, write_rows

from drl.errors import DataError, Interrupted
from drl.stages.ahead import REPORT_S, Progress
from drl.stages.encode import collect_records


@pytest.fixture
def broken(tmp_path: Path) -> Path:
    """Eight rows, of which the second, fourth and eighth can be used."""
    image_rows(tmp_path, 3)
    (tmp_path / "words.png").write_text("no picture")
    (tmp_path / "notes.txt").write_text("no picture either")
    picture = (tmp_path / "media" / "0.png").read_bytes()
    (tmp_path / "torn.png").write_bytes(picture[: len(picture) - 30])
    names: list[dict[str, Any]] = [
        {"image": "gone.png"},
        {"image": "media/0.png"},
        {"image": "words.png"},
        {"image": "media/1.png"},
        {},
        {"image": "notes.txt"},
        {"image": "media/0.png", "video": "clip.mp4"},
        {"image": "media/2.png"},
    ]
    return write_rows(
        tmp_path / "data.jsonl",
        [{"input": f"row {n}", "metadata": one} for n, one in enumerate(names, start=1)],
    )


def test_all_broken_rows_are_listed_before_anything_is_encoded(broken: Path) -> None:
    run = encoding_run(broken)
    with pytest.raises(DataError) as refusal:
        collect_records(run, 0)
    lines = str(refusal.value).splitlines()
    assert lines[0] == "data.source = 'jsonl': 5 rows cannot be used"
    assert lines[1] == f"  row 1: gone.png: does not exist in {broken.parent}"
    assert lines[2].startswith("  row 3: words.png: cannot be read as an image (")
    assert lines[3] == (
        "  row 5: names no media: give metadata.image or metadata.video, one of them"
    )
    assert lines[4].startswith("  row 6: notes.txt: is no image (.bmp, .jpeg")
    assert lines[5].startswith("  row 7: names no media: give metadata.image or metadata.video")
    assert lines[6].endswith("leave them out with data.on_broken_row = 'skip'")
    assert run.pipeline.media == []
    assert not (broken.parent / ".sft_cache").exists()


def test_broken_rows_can_be_skipped_and_are_counted(broken: Path) -> None:
    run = encoding_run(broken, Settings(on_broken_row="skip"))
    rows = [
        group.prompt.row for number in range(3) for group in collect_records(run, number).groups
    ]
    assert rows == [2, 4, 8, 2, 4, 8]
    assert run.row["rollout/sft_broken_rows"] == 5
    assert run.counters.images_seen == 6
    (event,) = run.told.events
    assert event.startswith("5 rows cannot be used and are left out\n  row 1: gone.png")


def test_many_broken_rows_are_counted_and_twenty_are_shown(tmp_path: Path) -> None:
    rows = [{"input": "a", "metadata": {"image": f"{number}.png"}} for number in range(30)]
    with pytest.raises(DataError) as refusal:
        collect_records(
            encoding_run(write_rows(tmp_path / "d.jsonl", rows), Settings(num_rollout=20)), 0
        )
    lines = str(refusal.value).splitlines()
    assert "30 rows cannot be used" in lines[0]
    assert lines[20].startswith("  row 20: ")
    assert lines[21] == "  … and 10 more"


def test_a_source_of_broken_rows_alone_ends_the_run_in_any_case(tmp_path: Path) -> None:
    rows = [{"input": "a", "metadata": {"image": f"{number}.png"}} for number in range(3)]
    run = encoding_run(write_rows(tmp_path / "d.jsonl", rows), Settings(on_broken_row="skip"))
    with pytest.raises(DataError, match=r"no row can be used; the last reason: 2\.png: does not"):
        collect_records(run, 0)


def test_what_only_decoding_shows_is_listed_once_the_rest_is_encoded(broken: Path) -> None:
    names = ["media/0.png", "torn.png", "media/1.png"]
    write_rows(broken, [{"input": name, "metadata": {"image": name}} for name in names])
    run = encoding_run(broken)
    with pytest.raises(DataError, match=r"1 row cannot be used\n  row 2: torn.png: cannot be read"):
        collect_records(run, 0)
    assert len(run.pipeline.media) == 2
    again = encoding_run(broken, Settings(on_broken_row="skip"))
    rows = [group.prompt.row for group in collect_records(again, 0).groups]
    assert (rows, again.pipeline.media) == ([1, 3], [])
    assert again.told.events[-1].startswith("1 row cannot be used and are left out")


def test_a_file_that_vanishes_later_is_refused_or_skipped_by_row(tmp_path: Path) -> None:
    data = image_rows(tmp_path, 4)
    for rule in ("refuse", "skip"):
        run = encoding_run(data, Settings(on_broken_row=rule, batch=1))
        collect_records(run, 0)
        lost = tmp_path / "media" / "1.png"
        content = lost.read_bytes()
        lost.unlink()
        if rule == "refuse":
            with pytest.raises(DataError, match=r"^row 2: media/1.png: does not exist"):
                collect_records(run, 1)
        else:
            assert collect_records(run, 1).groups[0].prompt.row == 3
            assert run.told.events == [
                f"row 2 is skipped: media/1.png: does not exist in {tmp_path}"
            ]
        lost.write_bytes(content)


def test_images_need_one_frame_and_videos_enough_of_them(tmp_path: Path) -> None:
    pytest.importorskip("av", reason="videos are read by PyAV")
    image_rows(tmp_path, 1)
    write_clip(tmp_path / "short.mp4", 4)
    rows = [{"image": "media/0.png"}, {"video": "short.mp4"}, {"video": "media/0.png"}]
    data = write_rows(tmp_path / "d.jsonl", [{"input": "a", "metadata": row} for row in rows])
    with pytest.raises(DataError) as refusal:
        collect_records(encoding_run(data, Settings(frames=5)), 0)
    _, first, second, third, _ = str(refusal.value).splitlines()
    assert first == "  row 1: media/0.png: is an image, but sampling.num_frames is 5; images need 1"
    assert second == "  row 2: short.mp4: has 4 frames, but sampling.num_frames = 5 needs 5"
    assert third.startswith("  row 3: media/0.png: cannot be read as a video")


def test_lines_that_are_no_json_are_refused_or_skipped_with_their_numbers(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    good = image_rows(tmp_path, 2).read_text().splitlines()
    data = write_rows(tmp_path / "d.jsonl", [good[0], "{broken", good[1], "[]"])
    with pytest.raises(
        DataError, match=r"2 broken rows\n  line 2: is not JSON.*\n  line 4: must be"
    ):
        encoding_run(data)
    with caplog.at_level("WARNING", logger="drl"):
        run = encoding_run(data, Settings(on_broken_row="skip"))
    assert "2 broken rows\n  line 2: is not JSON" in caplog.text
    assert [group.prompt.row for group in collect_records(run, 0).groups] == [1, 3]


def test_a_file_of_broken_lines_alone_is_refused_in_any_case(tmp_path: Path) -> None:
    data = write_rows(tmp_path / "d.jsonl", ["{broken", "[]"])
    with pytest.raises(DataError, match="2 broken rows"):
        encoding_run(data, Settings(on_broken_row="skip"))


def test_progress_is_told_for_the_look_and_for_the_encoding(tmp_path: Path) -> None:
    run = encoding_run(image_rows(tmp_path, 3))
    collect_records(run, 0)
    assert run.told.phases == [
        *(("check data", done, 3) for done in (1, 2, 3)),
        *(("encode", done, 3) for done in (1, 2, 3)),
    ]


def test_the_time_that_is_left_is_told_now_and_then_from_the_first_row_on() -> None:
    progress = Progress(101)
    assert progress.line(500.0) is None
    progress.count(1000.0)  # that it came late says nothing about the others
    assert progress.line(1000.0 + 2 * REPORT_S) is None
    for _ in range(20):
        progress.count(1001.0)
    assert progress.line(1000.0 + REPORT_S - 1) is None
    assert progress.line(1050.0) == "encoded 21 of 101 rows, about 200 s left"
    assert progress.line(1050.0 + REPORT_S / 2) is None


def test_asked_to_stop_it_ends_between_two_rows_and_goes_on_later(tmp_path: Path) -> None:
    data = image_rows(tmp_path, 4)
    run = encoding_run(data)

    def stop_after_two(phase: str, done: int, total: int) -> None:
        if (phase, done) == ("encode", 2):
            run.stop.asked, run.stop.reason = True, "SIGINT"

    run.progress = stop_after_two
    with pytest.raises(
        Interrupted, match=r"by SIGINT while data were encoded: 2 of 4 rows are done"
    ):
        collect_records(run, 0)
    assert run.source.state()["position"] == 0
    again = encoding_run(data)
    collect_records(again, 0)
    assert (run.pipeline.texts, again.pipeline.texts) == (
        ["picture 0", "picture 1"],
        ["picture 2", "picture 3"],
    )


def test_asked_to_stop_during_the_look_nothing_is_encoded(tmp_path: Path) -> None:
    run = encoding_run(image_rows(tmp_path, 4))
    run.stop.asked, run.stop.reason = True, "SIGTERM"
    with pytest.raises(Interrupted, match=r"by SIGTERM while data were checked: 1 of 4 rows"):
        collect_records(run, 0)
    assert run.pipeline.media == []

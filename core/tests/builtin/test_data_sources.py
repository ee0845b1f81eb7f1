"""The jsonl source: order, epochs, resume, and errors that name every line at fault."""

import dataclasses
import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from drl.api import Context, DataError, Group, MediaFile, Prompt
from drl.builtin.config_data import JsonlOptions
from drl.builtin.data_jsonl import JsonlSource
from drl.builtin.jsonl_rows import Row, digest, media_of, read_prompts
from drl.testing.contracts.data_source import DataSourceContract


@dataclasses.dataclass(frozen=True)
class Section:
    """The keys of ``[data]`` that a source reads."""

    prompt_data: Path | None
    input_key: str = "input"
    metadata_key: str = "metadata"
    on_broken_row: str = "refuse"


Make = Callable[..., JsonlSource]


def write(path: Path, *rows: Any) -> Path:
    """Write rows as JSON lines; strings and bytes are written as they are."""
    lines = [
        row
        if isinstance(row, bytes)
        else (row if isinstance(row, str) else json.dumps(row)).encode("utf-8")
        for row in rows
    ]
    path.write_bytes(b"".join(line + b"\n" for line in lines))
    return path


def letters(path: Path, names: str) -> Path:
    return write(path, *({"input": name} for name in names))


@pytest.fixture
def make(tmp_path: Path) -> Make:
    """Makes a source of the rows a, b, c, d, e with the given options."""
    path = letters(tmp_path / "prompts.jsonl", "abcde")

    def source(seed: int = 0, section: Section | None = None, **options: Any) -> JsonlSource:
        context = Context(seed=seed, section=section or Section(path))
        return JsonlSource(JsonlOptions(**options), context)

    return source


def texts(prompts: list[Prompt]) -> str:
    return "".join(prompt.text for prompt in prompts)


class TestJsonl(DataSourceContract):
    component = ("data_source", "jsonl")

    @pytest.fixture
    def section(self, tmp_path: Path) -> Section:
        return Section(letters(tmp_path / "prompts.jsonl", "abcde"))

    @pytest.fixture
    def empty_section(self, tmp_path: Path) -> Section:
        return Section(letters(tmp_path / "empty.jsonl", ""))


class TestShuffledJsonl(TestJsonl):
    @pytest.fixture
    def option_values(self) -> dict[str, Any]:
        return {"shuffle": True, "limit": 4}


def test_file_order_is_kept_over_epochs(make: Make) -> None:
    source = make()
    assert texts(source.take(7)) == "abcdeab"
    assert texts(source.take(9)) == "cdeabcdea"


def test_rows_are_line_numbers_and_epochs_count(make: Make) -> None:
    found = make().take(6)
    assert [prompt.row for prompt in found] == [1, 2, 3, 4, 5, 1]
    assert [prompt.epoch for prompt in found] == [0, 0, 0, 0, 0, 1]


def test_metadata_travels_with_its_row(tmp_path: Path) -> None:
    path = write(
        tmp_path / "p.jsonl",
        {"text": "a sign", "extra": {"target": 'It\'s "open"'}},
        {"text": "plain"},
        {"text": "null is none", "extra": None},
    )
    context = Context(section=Section(path, input_key="text", metadata_key="extra"))
    found = JsonlSource(JsonlOptions(), context).take(3)
    assert [dict(prompt.metadata) for prompt in found] == [{"target": 'It\'s "open"'}, {}, {}]


def test_equal_texts_stay_two_rows(tmp_path: Path) -> None:
    section = Section(letters(tmp_path / "p.jsonl", "aa"))
    found = JsonlSource(JsonlOptions(), Context(section=section)).take(2)
    assert [(prompt.row, prompt.text) for prompt in found] == [(1, "a"), (2, "a")]


def test_limit_takes_the_first_rows(make: Make) -> None:
    source = make(limit=2)
    assert source.rows() == 2
    assert texts(source.take(5)) == "ababa"
    assert make(limit=99).rows() == 5


def test_shuffling_depends_on_seed_and_epoch_alone(make: Make) -> None:
    source = make(seed=3, shuffle=True)
    epochs = [texts(source.take(5)) for _ in range(4)]
    assert all(sorted(epoch) == list("abcde") for epoch in epochs)
    assert len(set(epochs)) > 1
    again = make(seed=3, shuffle=True)
    again.restore({**again.state(), "epoch": 2, "position": 0})
    assert texts(again.take(5)) == epochs[2]
    assert texts(make(seed=4, shuffle=True).take(20)) != "".join(epochs)


def test_a_negative_count_is_refused(make: Make) -> None:
    with pytest.raises(DataError, match="not negative, got -1"):
        make().take(-1)


def test_groups_given_back_keep_their_epoch(make: Make) -> None:
    source = make()
    last = source.take(6)[-1]
    source.give_back([Group(group_index=5, prompt=last, samples=[])])
    assert [(one.row, one.epoch) for one in source.take(2)] == [(1, 1), (2, 1)]


def test_a_group_of_another_file_is_refused(make: Make) -> None:
    stranger = Group(group_index=0, prompt=Prompt(row=77, text="z"), samples=[])
    source = make()
    with pytest.raises(DataError, match="no prompt in line 77"):
        source.give_back([stranger])
    assert source.state()["buffer"] == []


def test_a_changed_file_is_not_resumed(make: Make, tmp_path: Path) -> None:
    state = make().state()
    letters(tmp_path / "prompts.jsonl", "abxde")
    with pytest.raises(DataError, match="not those of the saved run"):
        make().restore(state)


def test_rows_beyond_the_limit_may_change(make: Make, tmp_path: Path) -> None:
    state = make(limit=3).state()
    letters(tmp_path / "prompts.jsonl", "abcxyz")
    source = make(limit=3)
    source.restore(state)
    assert texts(source.take(4)) == "abca"


@pytest.mark.parametrize("options", [{"shuffle": True}, {"limit": 4}])
def test_other_options_are_not_resumed(make: Make, options: dict[str, Any]) -> None:
    with pytest.raises(DataError, match="not those of the saved run"):
        make(**options).restore(make().state())


def test_rows_without_text_are_skipped_and_counted(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    section = Section(write(tmp_path / "p.jsonl", {"input": ""}, {"input": "a"}, {"input": " \t"}))
    with caplog.at_level(logging.WARNING, logger="drl"):
        source = JsonlSource(JsonlOptions(), Context(section=section))
    assert source.skipped == (1, 3)
    assert source.rows() == 1
    assert "2 rows without text are skipped: lines 1, 3\n" in caplog.text


def test_blank_lines_keep_the_numbering(tmp_path: Path) -> None:
    path = write(tmp_path / "p.jsonl", "", {"input": "a"}, "  ", {"input": "b"}, "")
    assert [row.number for row in read(path).rows] == [2, 4]


def test_a_byte_order_mark_and_windows_line_ends_are_read(tmp_path: Path) -> None:
    path = tmp_path / "p.jsonl"
    path.write_bytes(b'\xef\xbb\xbf{"input": "a"}\r\n{"input": "b"}')
    assert [row.text for row in read(path).rows] == ["a", "b"]


def test_a_line_separator_inside_a_text_is_no_line_end(tmp_path: Path) -> None:
    path = write(tmp_path / "p.jsonl", '{"input": "one\u2028two"}')
    assert [row.text for row in read(path).rows] == ["one\u2028two"]


def read(path: Path) -> Any:
    return read_prompts(path, input_key="input", metadata_key="metadata")


@pytest.mark.parametrize(
    ("row", "complaint"),
    [
        ('{"input": "a"', "is not JSON"),
        (b'{"input": "\xff"}', "is not UTF-8"),
        ('["a"]', "must be a JSON object, is a list"),
        ("3", "must be a JSON object, is a number"),
        ({"input": 3}, "'input' must be a string, is a number"),
        ({"input": None}, "'input' must be a string, is null"),
        ({"input": ["a"]}, "'input' must be a string, is a list"),
        ('{"input": "\\ud800"}', "half a surrogate pair"),
        ({"input": "a", "metadata": "x"}, "'metadata' must be a JSON object, is a string"),
        ({"input": "a", "metadata": [1]}, "'metadata' must be a JSON object, is a list"),
        ({"input": "a", "metadata": True}, "'metadata' must be a JSON object, is a boolean"),
        ({"inputs": "a", "id": 1}, "lacks 'input'; nearest key: 'inputs'"),
        ({}, "lacks 'input': it is an empty object"),
        ("[" * 100_000, "is not JSON"),
    ],
)
def test_a_broken_row_is_named(tmp_path: Path, row: Any, complaint: str) -> None:
    path = write(tmp_path / "p.jsonl", {"input": "a"}, row)
    with pytest.raises(DataError) as caught:
        read(path)
    assert "1 broken row\n  line 2: " in str(caught.value)
    assert complaint in str(caught.value)
    assert str(path) in str(caught.value)


def test_all_broken_rows_are_counted_and_ten_are_shown(tmp_path: Path) -> None:
    rows = [{"input": "a"} if number % 2 else "broken" for number in range(30)]
    with pytest.raises(DataError) as caught:
        read(write(tmp_path / "p.jsonl", *rows))
    message = str(caught.value).splitlines()
    assert "15 broken rows" in message[0]
    assert [line.split(":")[0].strip() for line in message[1:11]] == [
        f"line {number}" for number in range(1, 21, 2)
    ]
    assert message[11:] == ["  … and 5 more"]


def test_an_empty_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="has no prompt: it is empty"):
        read(write(tmp_path / "p.jsonl"))


def test_a_file_of_empty_texts_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="all 2 rows have an empty text"):
        read(write(tmp_path / "p.jsonl", {"input": ""}, {"input": " "}))


@pytest.mark.parametrize("name", ["p.json", "p.txt", "p"])
def test_another_extension_is_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(DataError, match=r"must end in \.jsonl"):
        read(letters(tmp_path / name, "a"))


def test_a_missing_file_and_a_folder_are_told_apart(tmp_path: Path) -> None:
    (tmp_path / "folder.jsonl").mkdir()
    with pytest.raises(DataError, match="does not exist"):
        read(tmp_path / "missing.jsonl")
    with pytest.raises(DataError, match="is not a file"):
        read(tmp_path / "folder.jsonl")


def test_no_path_is_refused(make: Make) -> None:
    with pytest.raises(DataError, match=r"data\.prompt_data is not set"):
        make(section=Section(None))


@pytest.mark.parametrize("wrong", [{"limit": 0}, {"shufle": True}])
def test_options_have_limits(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValueError):
        JsonlOptions(**wrong)


def test_the_digest_follows_content_and_line_numbers_and_not_the_order_of_keys() -> None:
    base = [Row(1, "a", {"x": 1, "y": 2}), Row(2, "b")]
    known = digest(base)
    assert len(known) == 16
    assert int(known, 16) >= 0
    assert digest([Row(1, "a", {"y": 2, "x": 1}), Row(2, "b")]) == known
    others = [
        [Row(1, "a", {"x": 1, "y": 3}), Row(2, "b")],
        [Row(1, "a", {"x": 1, "y": 2}), Row(3, "b")],
        [Row(1, "a", {"x": 1, "y": 2}), Row(2, "B")],
        base[::-1],
        base[:1],
        [],
    ]
    assert len({known, *map(digest, others)}) == 1 + len(others)


@pytest.mark.parametrize(("broken", "more"), [(9, ""), (10, ""), (11, "\n  … and 1 more")])
def test_the_rest_of_the_broken_rows_is_counted_when_there_is_a_rest(
    tmp_path: Path, broken: int, more: str
) -> None:
    path = write(tmp_path / "p.jsonl", *["nonsense"] * broken)
    with pytest.raises(DataError) as failure:
        read_prompts(path, input_key="input", metadata_key="metadata")
    lines = str(failure.value).splitlines()
    assert lines[0].endswith(f"has {broken} broken rows")
    assert len(lines) == 1 + min(broken, 10) + (1 if more else 0)
    assert str(failure.value).endswith(more)


@pytest.mark.parametrize("name", ["prompts", "prompts.json", "prompts.jsonl.gz"])
def test_the_extension_that_was_given_is_named(tmp_path: Path, name: str) -> None:
    with pytest.raises(DataError, match=f"got {Path(name).suffix or 'no extension'}$"):
        read_prompts(tmp_path / name, input_key="input", metadata_key="metadata")


@pytest.mark.parametrize("escape", ["\\ud800", "\\udfff", "x\\udc00y"])
def test_half_a_surrogate_pair_is_refused_and_a_whole_one_read(tmp_path: Path, escape: str) -> None:
    path = write(tmp_path / "p.jsonl", f'{{"input": "{escape}"}}', '{"input": "\\ud83d\\ude00"}')
    with pytest.raises(DataError, match=r"1 broken row\n  line 1: 'input' holds half a surrogate"):
        read_prompts(path, input_key="input", metadata_key="metadata")
    whole = write(tmp_path / "q.jsonl", '{"input": "\\ud83d\\ude00 \ud7ff\ue000"}')
    found = read_prompts(whole, input_key="input", metadata_key="metadata")
    assert found.rows[0].text == "😀 \ud7ff\ue000"


@pytest.mark.parametrize(
    ("metadata", "expected"),
    [
        ({"image": "a.png"}, ("a.png", "image")),
        ({"video": "clips/b.mp4", "fps": 8}, ("clips/b.mp4", "video")),
        ({"image": "", "video": "b.mp4"}, ("b.mp4", "video")),
        ({"image": "/data/a.png"}, ("/data/a.png", "image")),
        ({"image": "a.png", "video": "b.mp4"}, None),
        ({"image": 3}, None),
        ({}, None),
    ],
)
def test_a_row_has_the_one_image_or_video_that_its_metadata_names(
    tmp_path: Path, metadata: dict[str, Any], expected: tuple[str, str] | None
) -> None:
    media = media_of(metadata, tmp_path)
    assert (None if media is None else (media.name, media.kind)) == expected
    if media is not None:
        assert media.path == tmp_path / media.name


def test_files_are_named_from_the_folder_of_the_rows_and_survive_a_resume(tmp_path: Path) -> None:
    row = {"input": "a", "meta": {"image": "pictures/a.png"}}
    path = write(tmp_path / "p.jsonl", row, {"input": "b", "meta": {}})
    context = Context(section=Section(path, metadata_key="meta"))
    source = JsonlSource(JsonlOptions(), context)
    (first, second) = source.take(2)
    assert first.media == MediaFile(root=tmp_path, name="pictures/a.png")
    assert second.media is None
    source.give_back([Group(group_index=0, prompt=first, samples=[])])
    resumed = JsonlSource(JsonlOptions(), context)
    resumed.restore(json.loads(json.dumps(source.state())))
    assert resumed.take(1)[0].media == first.media

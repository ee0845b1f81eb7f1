"""Files of samples and pairs: what goes in comes out, and what comes from elsewhere is only ever data."""

from __future__ import annotations

import json
import os
from dataclasses import fields, is_dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from drl.dumps import Packer, Unpacker, read_dump, write_dump
from drl.errors import DataError, DrlError
from drl.testing import make_pair, make_sample
from drl.types import Group, MediaFile, Prompt, Score


def equal(left: Any, right: Any) -> bool:
    """Equal types, values and bits, through all levels."""
    if isinstance(left, torch.Tensor):
        return left.dtype == right.dtype and left.shape == right.shape and torch.equal(left, right)
    if is_dataclass(left):
        return type(left) is type(right) and all(
            equal(left.__getattribute__(f.name), right.__getattribute__(f.name))
            for f in fields(left)
        )
    if isinstance(left, dict | MappingProxyType):
        return left.keys() == right.keys() and all(equal(left[k], right[k]) for k in left)
    if isinstance(left, list | tuple):
        return (
            type(left) is type(right)
            and len(left) == len(right)
            and all(equal(a, b) for a, b in zip(left, right, strict=True))
        )
    return type(left) is type(right) and repr(left) == repr(right)


def through_a_file(folder: Path, value: Any) -> Any:
    write_dump(folder / "dump", "test", {"value": value})
    return read_dump(folder / "dump", "test")["value"]


def test_samples_and_pairs_come_back_as_they_were(tmp_path: Path) -> None:
    sample = make_sample(seed=3, steps=4, reward=0.5)
    sample.scores = {"ocr": Score(value=0.5, parts={"near": 1.0}), "bad": Score(value=None)}
    sample.echo = {"num_steps": 4, "negative_prompt": None}
    group = Group(group_index=2, prompt=sample.prompt, samples=[sample])
    pair = make_pair(id=(1, 2), unit=1, seed=4)
    assert equal(through_a_file(tmp_path, [group, pair]), [group, pair])


def test_rows_of_a_data_set_come_back(tmp_path: Path) -> None:
    inside = MediaFile(root=Path("/data"), name="a.png", content=b"\x00\xff", version="7")
    prompt = Prompt(row=3, text="a sign", metadata={"box": (1, 2)}, media=inside)
    assert equal(through_a_file(tmp_path, prompt), prompt)
    assert through_a_file(tmp_path, b"") == b""


PLAIN = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.tuples(inner, inner)
        | st.dictionaries(st.text(max_size=5) | st.sampled_from(["$tensor", "$record"]), inner)
        | st.dictionaries(st.integers(), inner, max_size=3)
    ),
    max_leaves=12,
)


@given(PLAIN)
def test_plain_values_come_back_whatever_their_keys_are(value: Any) -> None:
    packer = Packer()
    text = json.dumps(packer.pack(value), allow_nan=False)
    assert equal(Unpacker(packer.tensors).unpack(json.loads(text)), value)


def test_numbers_of_other_libraries_become_numbers(tmp_path: Path) -> None:
    back = through_a_file(tmp_path, [np.float32(0.5), np.int64(3), np.bool_(True).item()])
    assert back == [0.5, 3, True]


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.uint8, torch.bool]
)
def test_tensors_keep_their_type_and_what_shares_memory_is_stored_once(
    tmp_path: Path, dtype: torch.dtype
) -> None:
    whole = torch.arange(12).reshape(3, 4).to(dtype)
    value = [whole, whole, whole[1], whole.T, torch.zeros(0, 2, dtype=dtype), whole[0, 0]]
    assert equal(through_a_file(tmp_path, value), value)
    assert len(load_file(tmp_path / "dump")) == 5


def test_a_dump_does_not_change_with_what_it_was_made_of() -> None:
    packer, tensor = Packer(), torch.zeros(3)
    packer.pack(tensor)
    tensor.fill_(1.0)
    assert packer.tensors["0"].tolist() == [0.0] * 3


def test_not_a_number_stays_one(tmp_path: Path) -> None:
    back = through_a_file(tmp_path, [float("nan"), float("inf"), -float("inf")])
    assert back[0] != back[0]
    assert back[1:] == [float("inf"), -float("inf")]


def test_what_has_no_form_is_named_by_its_place_and_nothing_is_written(tmp_path: Path) -> None:
    sample = make_sample()
    sample.echo = {"made": {1, 2}}
    with pytest.raises(DataError, match=r"but \.samples\[0\]\.echo\.made is a set"):
        write_dump(tmp_path / "dump", "test", {"samples": [sample]})
    with pytest.raises(DataError, match="is a Module"):
        write_dump(tmp_path / "dump", "test", {"samples": torch.nn.Module()})
    assert list(tmp_path.iterdir()) == []


def written(folder: Path, table: Any, **tensors: torch.Tensor) -> Path:
    """A file of another hand."""
    text = table if isinstance(table, str) else json.dumps(table)
    save_file(tensors, folder / "file", metadata={"drl": text})
    return folder / "file"


FIT = {"kind": "test", "version": 1}


@pytest.mark.parametrize(
    "table",
    [
        "{",
        "[" * 100_000,
        "[]",
        "7",
        {},
        {"kind": "test"},
        {**FIT, "value": {"$tensor": "9"}},
        {**FIT, "value": {"$tensor": ["x"]}},
        {**FIT, "value": {"$record": "Popen"}},
        {**FIT, "value": {"$record": ["Sample"]}},
        {**FIT, "value": {"$record": "Score"}},
        {**FIT, "value": {"$record": "Score", "value": 1.0, "colour": 2}},
        {**FIT, "value": {"$float": "many"}},
        {**FIT, "value": {"$path": 3}},
        {**FIT, "value": {"$table": [[1]]}},
        {**FIT, "value": {"$tuple": 3}},
        {**FIT, "value": {"$code": "print"}},
        {**FIT, "value": {"$table": [[[1], 2]]}},
        {**FIT, "$record": "Score", "value": 1.0},
    ],
)
def test_a_table_that_cannot_be_right_is_refused(tmp_path: Path, table: Any) -> None:
    path = written(tmp_path, table)
    with pytest.raises(DataError, match="cannot be read as a dump of drl"):
        read_dump(path, "test")


def test_other_files_and_other_formats_are_named(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"there is no file .*nothing"):
        read_dump(tmp_path / "nothing", "test")
    (tmp_path / "text").write_text("hello")
    with pytest.raises(DataError, match="text cannot be read as a dump of drl"):
        read_dump(tmp_path / "text", "test")
    save_file({"w": torch.zeros(2)}, tmp_path / "weights")
    with pytest.raises(DataError, match="is a safetensors file, but no dump of drl"):
        read_dump(tmp_path / "weights", "test")
    write_dump(tmp_path / "shard", "shard", {})
    with pytest.raises(DataError, match="'shard' of format 1, not 'rollout' of format 1"):
        read_dump(tmp_path / "shard", "rollout")
    with pytest.raises(DataError, match="of format 2"):
        read_dump(written(tmp_path, {"kind": "test", "version": 2}), "test")


def test_a_torn_file_is_refused(tmp_path: Path) -> None:
    write_dump(tmp_path / "dump", "test", {"value": torch.arange(100)})
    content = (tmp_path / "dump").read_bytes()
    for length in (0, 7, 60, len(content) - 1):
        (tmp_path / "torn").write_bytes(content[:length])
        with pytest.raises(DataError, match="cannot be read as a dump"):
            read_dump(tmp_path / "torn", "test")


def test_folders_are_made_and_files_are_replaced_whole(tmp_path: Path) -> None:
    path = tmp_path / "a" / "b" / "dump"
    path.parent.mkdir(parents=True)
    (path.parent / ".dump.0123456789ab.partial").touch()  # of a process that was killed
    for number in (1, 2):
        write_dump(path, "test", {"value": number})
    assert read_dump(path, "test") == {"value": 2}
    assert [file.name for file in path.parent.iterdir()] == ["dump"]


def test_a_place_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(DrlError, match=r"file/dump could not be written") as caught:
        write_dump(tmp_path / "file" / "dump", "test", {})
    assert not isinstance(caught.value, DataError)
    assert caught.value.exit_code == 1


def test_no_pickle_is_in_a_file(tmp_path: Path) -> None:
    write_dump(tmp_path / "dump", "test", {"value": make_sample()})
    content = (tmp_path / "dump").read_bytes()
    size = int.from_bytes(content[:8], "little")
    header = json.loads(content[8 : 8 + size])
    assert json.loads(header["__metadata__"]["drl"])["value"]["$record"] == "Sample"
    assert os.path.getsize(tmp_path / "dump") == 8 + size + max(
        end
        for name, entry in header.items()
        if name != "__metadata__"
        for end in entry["data_offsets"]
    )

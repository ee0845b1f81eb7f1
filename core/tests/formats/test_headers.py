"""Headers are read without tensors, and every kind of damage is named."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from drl.errors import BadInput
from drl.formats.headers import TensorFacts, read_header


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "some.safetensors"
    tensors = {
        "a": torch.zeros(2, 3),
        "b": torch.zeros(4, dtype=torch.bfloat16),
        "c": torch.tensor(1, dtype=torch.int64),
        "d": torch.zeros(5, dtype=torch.uint8),
    }
    save_file(tensors, path, metadata={"format": "pt", "key": "value"})
    return path


def test_names_shapes_dtypes_and_metadata(file: Path) -> None:
    header = read_header(file)
    assert header.metadata == {"format": "pt", "key": "value"}
    assert header.tensors["a"] == TensorFacts("F32", (2, 3))
    assert header.tensors["b"] == TensorFacts("BF16", (4,))
    assert header.tensors["c"] == TensorFacts("I64", ())


@pytest.mark.parametrize(("name", "size"), [("a", 24), ("b", 8), ("c", 8), ("d", 5)])
def test_bytes_follow_from_shape_and_dtype(file: Path, name: str, size: int) -> None:
    assert read_header(file).tensors[name].bytes == size


def test_a_file_without_metadata_has_none(tmp_path: Path) -> None:
    save_file({"a": torch.zeros(1)}, tmp_path / "bare.safetensors")
    assert read_header(tmp_path / "bare.safetensors").metadata == {}


@pytest.mark.parametrize("kept", [1, 7, 8, 20, -1])
def test_a_truncated_file_is_named(file: Path, kept: int) -> None:
    content = file.read_bytes()
    file.write_bytes(content[:kept])
    with pytest.raises(BadInput, match=r"some.safetensors cannot be read .* copy it again"):
        read_header(file)


def test_an_empty_a_missing_file_and_a_folder_say_so(tmp_path: Path) -> None:
    (tmp_path / "empty.safetensors").touch()
    for name, words in (
        ("empty.safetensors", "is empty"),
        ("gone", "does not exist"),
        (".", "directory"),
    ):
        with pytest.raises(BadInput, match=words):
            read_header(tmp_path / name)


def test_a_header_that_promises_too_much_is_damage(tmp_path: Path) -> None:
    (tmp_path / "big").write_bytes((2**60).to_bytes(8, "little") + b"{}")
    with pytest.raises(BadInput, match="cannot be read"):
        read_header(tmp_path / "big")


def test_time_does_not_depend_on_size(tmp_path: Path) -> None:
    path = tmp_path / "large.safetensors"
    save_file({"a": torch.zeros(25_000_000)}, path)
    start = time.perf_counter()
    header = read_header(path)
    assert time.perf_counter() - start < 0.1
    assert header.tensors["a"].bytes == 100_000_000

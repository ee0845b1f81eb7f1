"""The cache of encoded files: what was written comes back, and what is damaged or another's does not."""

from __future__ import annotations

import math
import os
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from drl.errors import ContractError, DataError
from drl.media.cache import EncodedFiles

KEY = {"what": "text", "encoders": {"family": "sd3", "options": None}, "text": 'a "sign" żółw'}
TENSORS = {
    "hidden": torch.arange(12.0).reshape(3, 4),
    "mask": torch.tensor([True, False]),
    "half": torch.tensor([1.5, -2.0], dtype=torch.bfloat16),
}


@pytest.fixture
def cache(tmp_path: Path) -> EncodedFiles:
    files = EncodedFiles(tmp_path / "cache")
    files.prepare()
    return files


def test_what_was_written_comes_back_bit_for_bit(cache: EncodedFiles) -> None:
    assert not cache.has(KEY)
    assert cache.read(KEY) is None
    cache.write(KEY, TENSORS, {"length": 3, "note": "ü"})
    assert cache.has(KEY)
    found = cache.read(KEY)
    assert found is not None
    assert found.values == {"length": 3, "note": "ü"}
    assert found.tensors.keys() == TENSORS.keys()
    for name, tensor in TENSORS.items():
        assert found.tensors[name].dtype == tensor.dtype
        assert torch.equal(found.tensors[name], tensor)


def test_the_name_is_16_hex_digits_of_the_key_and_the_order_of_keys_does_not_matter(
    cache: EncodedFiles,
) -> None:
    name = cache.file(KEY).name
    digits, what, ending = name.split(".")
    assert (len(digits), what, ending) == (16, "text", "safetensors")
    assert int(digits, 16) >= 0
    assert cache.file(dict(reversed(KEY.items()))).name == name
    others: list[dict[str, Any]] = [
        {**KEY, "text": "b"},
        {**KEY, "what": "latents"},
        {**KEY, "encoders": {"family": "sd3", "options": {}}},
    ]
    assert len({name, *(cache.file(other).name for other in others)}) == 4


def test_a_file_is_the_format_that_other_tools_read(cache: EncodedFiles) -> None:
    cache.write(KEY, TENSORS, {})
    assert torch.equal(load_file(cache.file(KEY))["hidden"], TENSORS["hidden"])
    with safe_open(cache.file(KEY), "pt") as file:
        assert set(file.metadata()) == {"drl"}


@pytest.mark.parametrize("keep", [0, 7, 100, -1])
def test_a_torn_file_is_as_good_as_absent(cache: EncodedFiles, keep: int) -> None:
    cache.write(KEY, TENSORS, {})
    file = cache.file(KEY)
    file.write_bytes(file.read_bytes()[:keep])
    assert not cache.has(KEY)
    assert cache.read(KEY) is None
    cache.write(KEY, TENSORS, {})
    assert cache.read(KEY) is not None


def test_one_flipped_bit_is_noticed(cache: EncodedFiles) -> None:
    cache.write(KEY, TENSORS, {})
    file = cache.file(KEY)
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    assert cache.read(KEY) is None


def test_the_file_of_another_key_or_of_another_program_is_not_taken(cache: EncodedFiles) -> None:
    other = {**KEY, "text": "another"}
    cache.write(other, TENSORS, {})
    cache.file(other).rename(cache.file(KEY))
    assert not cache.has(KEY)
    assert cache.read(KEY) is None
    save_file(TENSORS, cache.file(KEY))
    assert not cache.has(KEY)
    assert cache.read(KEY) is None


def test_values_that_json_does_not_hold_are_the_familys_fault(cache: EncodedFiles) -> None:
    for value in (object(), math.nan):
        with pytest.raises(ContractError, match="values of a ConditionRecord"):
            cache.write(KEY, TENSORS, {"x": value})
    assert list(cache.folder.iterdir()) == []


def test_equal_content_is_equal_bytes(cache: EncodedFiles) -> None:
    contents = set()
    for order in (TENSORS, dict(reversed(TENSORS.items()))):
        cache.write(KEY, order, {"b": 1, "a": 2})
        contents.add(cache.file(KEY).read_bytes())
    assert len(contents) == 1


@pytest.mark.parametrize("label", ["nonsense", "[]", "{}", "[" * 100_000])
def test_a_label_of_another_form_is_another_programs(cache: EncodedFiles, label: str) -> None:
    save_file(TENSORS, cache.file(KEY), {"drl": label})
    assert not cache.has(KEY)
    assert cache.read(KEY) is None


def test_a_tensor_that_is_a_view_is_written_as_it_reads(cache: EncodedFiles) -> None:
    whole = torch.arange(12.0).reshape(3, 4)
    cache.write(KEY, {"a": whole.T, "b": whole[1], "c": whole}, {})
    found = cache.read(KEY)
    assert found is not None
    assert torch.equal(found.tensors["a"], whole.T)
    assert torch.equal(found.tensors["b"], whole[1])


def test_a_folder_that_cannot_be_written_is_named_with_the_option(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for folder in (tmp_path / "file", tmp_path / "file" / "below", Path("/proc/drl/cache")):
        with pytest.raises(DataError, match=rf"^data\.sft_cache: .*{folder}.*set data\.sft_cache"):
            EncodedFiles(folder).prepare()
        with pytest.raises(DataError, match=r"^data\.sft_cache: "):
            EncodedFiles(folder).write(KEY, TENSORS, {})


def test_what_killed_processes_left_is_removed_when_it_is_old(cache: EncodedFiles) -> None:
    old, new = (cache.folder / f".x.safetensors.{name}.partial" for name in ("old", "new"))
    kept = cache.folder / "notes.txt"
    for file in (old, new, kept):
        file.write_text("half")
    os.utime(old, (time.time() - 7200,) * 2)
    os.utime(kept, (time.time() - 7200,) * 2)
    cache.prepare()
    assert sorted(file.name for file in cache.folder.iterdir()) == [new.name, "notes.txt"]


def test_tensors_stay_when_their_file_is_replaced(cache: EncodedFiles) -> None:
    cache.write(KEY, TENSORS, {})
    found = cache.read(KEY)
    assert found is not None
    file = cache.file(KEY)
    file.write_bytes(b"\xff" * file.stat().st_size)
    assert torch.equal(found.tensors["hidden"], TENSORS["hidden"])


def test_a_key_whose_file_was_discarded_is_written_anew(cache: EncodedFiles) -> None:
    cache.write(KEY, TENSORS, {})
    cache.discard(KEY)
    cache.discard(KEY)
    assert not cache.has(KEY)

"""Digests of a checkpoint's files: every kind of harm is found and named."""

from __future__ import annotations

import hashlib
import json
import os

import pytest

from drl.checkpoint.manifest import MANIFEST, damage, files_of, write_manifest


@pytest.fixture
def folder(tmp_path):
    folder = tmp_path / "iter_0000001"
    for name in ("model", "optimizer", "rng"):
        (folder / name).mkdir(parents=True)
        (folder / name / "data").write_bytes(name.encode() * 1000)
    (folder / "model" / ".metadata").write_bytes(b"meta")
    (folder / "run.json").write_text("{}")
    write_manifest(folder)
    return folder


def test_every_file_is_named_with_its_sha256(folder):
    table = json.loads((folder / MANIFEST).read_text())
    assert sorted(table) == [
        "model/.metadata",
        "model/data",
        "optimizer/data",
        "rng/data",
        "run.json",
    ]
    assert table["model/data"] == hashlib.sha256(b"model" * 1000).hexdigest()
    assert damage(folder) is None


def test_writing_again_gives_the_same_bytes(folder):
    before = (folder / MANIFEST).read_bytes()
    write_manifest(folder)
    assert (folder / MANIFEST).read_bytes() == before


@pytest.mark.parametrize("place", [0, 1, 2499, 4999])
@pytest.mark.parametrize("bit", [0, 7])
def test_one_flipped_bit_is_found(folder, place, bit):
    file = folder / "model" / "data"
    content = bytearray(file.read_bytes())
    content[place] ^= 1 << bit
    file.write_bytes(content)
    assert damage(folder) == "model/data differs from its checksum"


def test_a_byte_less_or_more_is_found(folder):
    file = folder / "rng" / "data"
    content = file.read_bytes()
    for changed in (content[:-1], content + b"\0", b""):
        file.write_bytes(changed)
        assert damage(folder) == "rng/data differs from its checksum"


@pytest.mark.parametrize("name", ["model/.metadata", "optimizer/data", "run.json"])
def test_a_missing_file_is_named(folder, name):
    (folder / name).unlink()
    assert damage(folder) == f"{name} is missing"


@pytest.mark.parametrize("name", ["model/__9_0.distcp", "extra.json", "ema/data"])
def test_a_foreign_file_is_named(folder, name):
    (folder / name).parent.mkdir(exist_ok=True)
    (folder / name).write_text("foreign")
    assert damage(folder) == f"{name} does not belong to it: {MANIFEST} does not name it"


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("", "is not JSON"),
        ("{", "is not JSON"),
        ("[]", "is no table of files"),
        ("{}", "is no table of files"),
        ("3", "is no table of files"),
        ("\xff", "is not JSON"),
    ],
)
def test_a_manifest_that_is_none(folder, content, words):
    (folder / MANIFEST).write_bytes(content.encode("latin-1"))
    assert damage(folder) == f"{MANIFEST} {words}"


def test_a_half_written_folder_has_no_manifest(folder):
    (folder / MANIFEST).unlink()
    assert damage(folder) == f"{MANIFEST} is missing"
    assert damage(folder.with_name("iter_0000009")) == "the folder is missing"


def test_what_cannot_be_read_is_damage_not_a_crash(folder):
    file = folder / "model" / "data"
    file.unlink()
    os.symlink(folder / "nowhere", file)
    assert damage(folder) == "model/data is missing"


def test_the_manifest_does_not_list_itself(folder):
    assert folder / MANIFEST not in files_of(folder)

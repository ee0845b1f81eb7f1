"""Metadata of a checkpoint is a pickle: what is read from it, and what is refused without being run."""

from __future__ import annotations

import os
import pickle
import random

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)

from drl.checkpoint import restricted
from drl.checkpoint.dcp import read_whole, write_tensors
from drl.checkpoint.restricted import METADATA, entries, read_metadata
from drl.checkpoint.shards import shard_of
from drl.errors import CheckpointError

WEIGHTS = {
    "transformer.a": torch.arange(6, dtype=torch.float32).view(2, 3),
    "transformer.b": torch.ones(4, dtype=torch.bfloat16),
    "transformer.a/step": torch.tensor(3.0),
}


@pytest.fixture
def folder(tmp_path):
    write_tensors({name: shard_of(tensor) for name, tensor in WEIGHTS.items()}, tmp_path / "model")
    return tmp_path / "model"


@pytest.fixture
def mark(tmp_path):
    """A file that a pickle which runs would make."""
    return tmp_path / "it-ran"


class Runs:
    """Unpickling it makes a file."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.mkdir, (str(self.path),)


def put(folder, content):
    (folder / METADATA).write_bytes(content)


def stored(folder):
    """Return the metadata as DCP itself reads it."""
    return pickle.loads((folder / METADATA).read_bytes())


def refused(folder, words):
    with pytest.raises(CheckpointError, match=words) as caught:
        read_metadata(folder)
    return str(caught.value)


def test_what_is_read_is_what_dcp_reads(folder):
    ours, theirs = read_metadata(folder), stored(folder)
    assert entries(ours).keys() == theirs.state_dict_metadata.keys() == WEIGHTS.keys()
    for name, entry in entries(ours).items():
        other = theirs.state_dict_metadata[name]
        assert (entry.size, entry.chunks) == (other.size, other.chunks)
        assert entry.properties.dtype == other.properties.dtype == WEIGHTS[name].dtype
    assert ours.storage_data == theirs.storage_data


def test_the_objects_are_those_of_torch_not_the_stand_ins(folder):
    metadata = read_metadata(folder)
    assert type(metadata) is Metadata
    assert {type(entry) for entry in metadata.state_dict_metadata.values()} == {
        TensorStorageMetadata
    }
    assert {type(key) for key in metadata.storage_data} == {MetadataIndex}
    assert {type(place) for place in metadata.storage_data.values()} == {_StorageInfo}


def test_a_checkpoint_that_plain_dcp_wrote_is_read(tmp_path):
    state = {"model": {"weight": torch.randn(3, 2), "bias": torch.randn(3)}}
    dcp.save(state, checkpoint_id=tmp_path / "theirs", no_dist=True)
    found = read_whole(tmp_path / "theirs")
    assert sorted(found) == ["model.bias", "model.weight"]
    assert torch.equal(found["model.weight"], state["model"]["weight"])


def test_python_objects_that_plain_dcp_wrote_are_refused_by_name(tmp_path):
    dcp.save({"weight": torch.ones(2), "epoch": 3}, checkpoint_id=tmp_path / "x", no_dist=True)
    assert "'epoch' is a pickled Python object" in refused(tmp_path / "x", "refused")


@pytest.mark.parametrize("wrap", [lambda x: x, lambda x: [x], lambda x: {"a": (x,)}])
def test_a_pickle_that_calls_a_function_is_refused_and_never_runs(folder, mark, wrap):
    put(folder, pickle.dumps(wrap(Runs(mark))))
    text = refused(folder, r"refused: it names posix\.mkdir")
    assert "add --trust-checkpoint" in text
    assert not mark.exists()


@pytest.mark.parametrize("protocol", [0, 1, 2, 3, 4, 5])
def test_no_protocol_is_a_way_in(folder, mark, protocol):
    put(folder, pickle.dumps(Runs(mark), protocol))
    refused(folder, "refused")
    assert not mark.exists()


def test_a_call_hidden_in_true_metadata_is_refused(folder, mark):
    metadata = stored(folder)
    metadata.planner_data = Runs(mark)
    put(folder, pickle.dumps(metadata))
    refused(folder, r"posix\.mkdir")
    assert not mark.exists()


def test_with_trust_the_same_pickle_runs(folder, mark):
    """The proof that the refused one was dangerous."""
    metadata = stored(folder)
    metadata.planner_data = Runs(mark)
    put(folder, pickle.dumps(metadata))
    assert isinstance(read_metadata(folder, trust=True), Metadata)
    assert mark.is_dir()


def test_with_trust_other_objects_are_still_no_checkpoint(folder):
    put(folder, pickle.dumps([1, 2]))
    with pytest.raises(CheckpointError, match="it holds list, not DCP's Metadata"):
        read_metadata(folder, trust=True)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"cos\nsystem\n(S'true'\ntR.", "pickle operation STRING"),
        (b"(S'true'\nios\nsystem\n.", "pickle operation STRING"),
        (b"\x80\x02(cos\nsystem\no.", r"pickle operation OBJ"),
        (b"\x80\x02\x82\x01.", "pickle operation EXT1"),
        (b"\x80\x05\x96\xff\xff\xff\xff\xff\xff\xff\x00.", "damaged"),
        (b"\x80\x04Pabc\n.", "pickle operation PERSID"),
        (b"\x80\x02Nr\xff\xff\xff\x0f.", "more memory than it has content"),
        (b"\x80\x04cbuiltins\neval\n.", r"names builtins\.eval"),
        (b"\x80\x04ctorch\nload\n.", r"names torch\.load"),
        (b"\x80\x04ctorch.serialization\nload\n.", r"names torch\.serialization\.load"),
        (b"\x80\x04ctorch\n_C\n.", r"names torch\._C"),
    ],
)
def test_what_dcp_never_writes_is_refused(folder, content, words):
    put(folder, content)
    refused(folder, words)


def test_a_class_that_dcp_writes_cannot_be_changed_by_a_pickle(folder):
    """BUILD with a slot state sets attributes, even of a class; it only reaches a stand-in."""
    place = b"ctorch.distributed.checkpoint.metadata\nMetadata\n"
    put(folder, b"\x80\x02" + place + b"N}X\x05\x00\x00\x00brokeK\x01s\x86b.")
    refused(folder, "refused|damaged")
    assert "broke" not in vars(Metadata)


def test_more_bytes_than_any_checkpoint_needs_are_not_read(folder, monkeypatch):
    monkeypatch.setattr(restricted, "LARGEST", 100)
    refused(folder, "and at most 100 are read")


def altered(folder, change):
    """Write the metadata again after a change to it."""
    metadata = stored(folder)
    change(metadata)
    put(folder, pickle.dumps(metadata))


def set_place(metadata, **fields):
    info = metadata.storage_data[MetadataIndex("transformer.b", torch.Size([0]))]
    for name, value in fields.items():
        setattr(info, name, value)


@pytest.mark.parametrize(
    "path", ["../secret", "/etc/passwd", "a/b.distcp", "..", ".", "", ".metadata\n"]
)
def test_a_place_outside_the_folder_is_refused(folder, path):
    altered(folder, lambda metadata: set_place(metadata, relative_path=path))
    refused(folder, "'transformer.b' lies in .*, which is no file of this folder")


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"offset": -1}, "has no place"),
        ({"length": "9"}, "has no place"),
        ({"length": 3}, "fewer bytes than its shape"),
        ({"offset": 10**9}, "is cut short"),
        ({"transform_descriptors": ["zstd"]}, "through extensions"),
        ({"relative_path": "__9_0.distcp"}, "cannot be read"),
        ({"relative_path": 3}, "where a name belongs"),
    ],
)
def test_a_place_without_the_bytes_is_named(folder, fields, words):
    altered(folder, lambda metadata: set_place(metadata, **fields))
    refused(folder, words)


def tensor(size, chunks, dtype=torch.float32):
    return TensorStorageMetadata(
        properties=TensorProperties(dtype=dtype),
        size=torch.Size(size),
        chunks=[ChunkStorageMetadata(torch.Size(o), torch.Size(s)) for o, s in chunks],
    )


@pytest.mark.parametrize(
    ("entry", "words"),
    [
        (tensor([2, 3], []), "do not fill its shape"),
        (tensor([2, 4], [([0, 0], [2, 3])]), "do not fill its shape"),
        (tensor([2, 3], [([0, 1], [2, 3])]), "a chunk without a place"),
        (tensor([1, 3], [([0, 0], [2, 3])]), "outside its shape"),
        (tensor([6], [([0, 0], [2, 3])]), "outside its shape"),
        (tensor([10**9], [([0], [10**9])]), "a chunk without a place"),
        (tensor([2**40, 3], [([0, 0], [2**40, 3])]), "fewer bytes than its shape"),
        (BytesStorageMetadata(), "a pickled Python object"),
        (StorageMeta(), "where TensorStorageMetadata belongs it has StorageMeta"),
        ("text", "where TensorStorageMetadata belongs it has str"),
    ],
)
def test_a_tensor_that_its_bytes_cannot_be_is_refused(folder, entry, words):
    altered(folder, lambda m: m.state_dict_metadata.update({"transformer.a": entry}))
    assert "transformer.a" in refused(folder, words) or "belongs" in words


def test_shapes_with_anything_but_counts_are_refused(folder):
    def change(metadata):
        metadata.state_dict_metadata["transformer.a"].size = (2, "3")

    altered(folder, change)
    refused(folder, "where a shape belongs")


def test_missing_metadata_names_the_file(tmp_path):
    assert ".metadata cannot be read: No such file" in refused(tmp_path, "No such file")


@pytest.mark.parametrize("length", [0, 1, 2, 10, 100, 500])
def test_cut_metadata_is_damage(folder, length):
    put(folder, (folder / METADATA).read_bytes()[:length])
    refused(folder, "damaged|refused")


def test_flipped_bits_give_an_error_or_the_same_names_and_nothing_runs(folder):
    whole = (folder / METADATA).read_bytes()
    rng = random.Random(5)
    for _ in range(400):
        content = bytearray(whole)
        for _ in range(rng.choice([1, 1, 2, 8])):
            content[rng.randrange(len(content))] ^= 1 << rng.randrange(8)
        put(folder, bytes(content))
        try:
            metadata = read_metadata(folder)
        except CheckpointError:
            continue
        for name, entry in entries(metadata).items():
            assert isinstance(name, str)
            assert sum(chunk.sizes.numel() for chunk in entry.chunks) == entry.size.numel()


def test_a_payload_that_is_a_program_does_not_run_either(folder, mark):
    """Tensor files are pickles too; torch's weights-only reader opens them."""
    info = next(iter(read_metadata(folder).storage_data.values()))
    place = folder / info.relative_path
    content = pickle.dumps(Runs(mark))
    place.write_bytes(content + b"\0" * (place.stat().st_size - len(content)))
    with pytest.raises(CheckpointError, match="cannot be read: "):
        read_whole(folder)
    assert not mark.exists()

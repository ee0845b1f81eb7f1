"""Tensors to and from DCP folders: exact, in DCP's own format, by one process or several."""

from __future__ import annotations

import resource
import subprocess
import sys
import textwrap

import pytest
import torch
import torch.distributed.checkpoint as dcp
from gloo_ranks import spawn
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

from drl.checkpoint import dcp as ours
from drl.checkpoint.dcp import parts_of, read_tensors, read_whole, write_tensors
from drl.checkpoint.restricted import read_metadata
from drl.checkpoint.shards import Shard, shard_of
from drl.errors import CheckpointError


def shards(tensors):
    return {name: shard_of(tensor) for name, tensor in tensors.items()}


def same(left, right):
    return left.keys() == right.keys() and all(
        left[k].dtype == right[k].dtype and torch.equal(left[k], right[k]) for k in left
    )


VARIED = {
    "matrix": torch.randn(5, 7),
    "half": torch.randn(3, 2).to(torch.bfloat16),
    "float16": torch.randn(4).to(torch.float16),
    "count": torch.tensor([1, 2, 3]),
    "scalar": torch.tensor(2.5),
    "bytes": torch.arange(9, dtype=torch.uint8),
    "empty": torch.zeros(0, 3),
    "a.name with / and 'quotes'": torch.ones(1),
}


def test_every_dtype_and_shape_comes_back_bit_for_bit(tmp_path):
    write_tensors(shards(VARIED), tmp_path / "x")
    assert same(read_whole(tmp_path / "x"), VARIED)


def test_views_are_stored_as_what_they_show(tmp_path):
    base = torch.randn(100, 100)
    views = {"row": base[3], "transposed": base[:4, :5].t(), "strided": base[::7, ::9]}
    write_tensors(shards(views), tmp_path / "x")
    assert same(read_whole(tmp_path / "x"), {k: v.contiguous() for k, v in views.items()})
    size = sum(file.stat().st_size for file in (tmp_path / "x").iterdir())
    assert size < base.nbytes / 2  # not the storage behind them


def test_not_a_number_and_negative_zero_keep_their_bits(tmp_path):
    odd = torch.tensor([float("nan"), float("inf"), -0.0, 1e-45])
    write_tensors(shards({"odd": odd}), tmp_path / "x")
    found = read_whole(tmp_path / "x")["odd"]
    assert torch.equal(found.view(torch.int32), odd.view(torch.int32))


def test_equal_states_give_equal_files_wherever_they_are_written(tmp_path):
    for place in ("a", "deeper/b"):
        (tmp_path / place).parent.mkdir(exist_ok=True)
        write_tensors(shards(VARIED), tmp_path / place)
    names = sorted(file.name for file in (tmp_path / "a").iterdir())
    assert names == [".metadata", "__0_0.distcp"]
    for name in names:
        assert (tmp_path / "a" / name).read_bytes() == (tmp_path / "deeper/b" / name).read_bytes()


def test_dcp_itself_reads_what_is_written(tmp_path):
    write_tensors(shards(VARIED), tmp_path / "x")
    targets = {name: torch.zeros_like(tensor) for name, tensor in VARIED.items()}
    planner = dcp.DefaultLoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
    dcp.load(targets, checkpoint_id=tmp_path / "x", planner=planner, no_dist=True)
    assert same(targets, VARIED)
    dcp_to_torch_save(tmp_path / "x", tmp_path / "one.pt")
    assert same(torch.load(tmp_path / "one.pt", weights_only=True), VARIED)


def test_no_tensors_are_a_checkpoint_too(tmp_path):
    write_tensors({}, tmp_path / "x")
    assert read_whole(tmp_path / "x") == {}


def test_much_is_written_by_several_threads_into_a_file_each(tmp_path, monkeypatch):
    monkeypatch.setattr(ours, "SMALL", 1000)
    tensors = {f"t{n}": torch.randn(10 + n, 10) for n in range(12)}
    write_tensors(shards(tensors), tmp_path / "x")
    files = sorted(file.name for file in (tmp_path / "x").glob("*.distcp"))
    assert files == [f"__0_{n}.distcp" for n in range(4)]
    assert same(read_whole(tmp_path / "x"), tensors)


def test_the_parts_of_a_plan_are_about_equal(monkeypatch):
    monkeypatch.setattr(ours, "SMALL", 0)
    items = [
        item
        for n in range(1, 21)
        for item in shard_of(torch.zeros(n)).__create_write_items__(f"t{n}", None)
    ]
    parts = parts_of(items)
    totals = [sum(ours.bytes_of(item) for item in part) for part in parts]
    assert sum(totals) == sum(4 * n for n in range(1, 21)) == 840
    assert max(totals) - min(totals) <= 4 * 4
    assert sorted(i.index.fqn for p in parts for i in p) == sorted(i.index.fqn for i in items)


def test_an_existing_file_is_never_written_over(tmp_path):
    write_tensors(shards(VARIED), tmp_path / "x")
    before = (tmp_path / "x" / "__0_0.distcp").read_bytes()
    with (
        pytest.warns(UserWarning, match="existing checkpoint"),
        pytest.raises(OSError, match="File exists"),
    ):
        write_tensors(shards({"other": torch.ones(3)}), tmp_path / "x")
    assert (tmp_path / "x" / "__0_0.distcp").read_bytes() == before


FULL = """
    import resource, sys, torch
    from pathlib import Path
    from drl.checkpoint import dcp
    from drl.checkpoint.shards import shard_of
    dcp.SMALL = 0
    big = {f"t{n}": shard_of(torch.zeros(1 if n else 5000)) for n in range(8)}
    resource.setrlimit(resource.RLIMIT_FSIZE, (8192, resource.RLIM_INFINITY))
    try:
        dcp.write_tensors(big, Path(sys.argv[1]))
    except OSError as error:
        print("said:", error)
"""


def test_a_thread_that_the_disk_refuses_is_heard_although_the_others_succeed(tmp_path):
    """DCP's own threads print such an error and go on, and the checkpoint lacks a tensor."""
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(FULL), str(tmp_path / "x")],
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout == "said: OSError: [Errno 27] File too large\n"
    assert done.stderr == ""
    assert not (tmp_path / "x" / ".metadata").exists()


def test_the_limit_of_the_child_is_not_ours():
    assert resource.getrlimit(resource.RLIMIT_FSIZE)[0] == resource.RLIM_INFINITY


@pytest.mark.parametrize("harm", ["cut", "zeros", "gone"])
def test_a_damaged_payload_is_named(tmp_path, harm):
    write_tensors(shards({"a": torch.randn(100)}), tmp_path / "x")
    file = tmp_path / "x" / "__0_0.distcp"
    if harm == "cut":
        file.write_bytes(file.read_bytes()[:-50])
    elif harm == "zeros":
        file.write_bytes(b"\0" * file.stat().st_size)
    else:
        file.unlink()
    with pytest.raises(CheckpointError, match=r"cut short|cannot be read") as caught:
        read_whole(tmp_path / "x")
    assert str(tmp_path / "x") in str(caught.value)


def test_reading_goes_into_the_memory_that_is_there_and_casts(tmp_path):
    values = torch.randn(6, 4)
    write_tensors(shards({"a": values}), tmp_path / "x")
    target = torch.zeros(6, 4, dtype=torch.bfloat16)
    read_tensors(tmp_path / "x", shards({"a": target}), read_metadata(tmp_path / "x"))
    assert torch.equal(target, values.to(torch.bfloat16))


def test_a_part_of_a_tensor_reads_its_own_rows(tmp_path):
    values = torch.randn(6, 4)
    write_tensors(shards({"a": values}), tmp_path / "x")
    part = torch.zeros(2, 4)
    shard = Shard(local=part, shape=values.shape, offsets=torch.Size([3, 0]), sharded=True)
    read_tensors(tmp_path / "x", {"a": shard}, read_metadata(tmp_path / "x"))
    assert torch.equal(part, values[3:5])


ROWS = {"even": 4, "uneven": 5, "one": 1}


def _save_two(rank, world, folder):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, distribute_tensor
    from torch.distributed.tensor import Shard as Rows

    mesh = init_device_mesh("cpu", (world,))
    torch.manual_seed(0)
    whole = {name: torch.randn(rows, 3) for name, rows in ROWS.items()}
    tensors = {name: distribute_tensor(t, mesh, [Rows(0)]) for name, t in whole.items()}
    tensors["columns"] = distribute_tensor(torch.arange(12.0).view(2, 6), mesh, [Rows(1)])
    tensors["replicated"] = distribute_tensor(torch.arange(3.0), mesh, [Replicate()])
    tensors["plain"] = torch.arange(5.0)
    write_tensors(shards(tensors), folder / "two", group=torch.distributed.group.WORLD)
    restored = {name: torch.zeros_like(tensor) for name, tensor in tensors.items()}
    read_tensors(folder / "one", shards(restored), read_metadata(folder / "one"))
    for name, tensor in tensors.items():
        left, right = (t.to_local() if name != "plain" else t for t in (tensor, restored[name]))
        assert torch.equal(left, right), name


def _whole():
    torch.manual_seed(0)
    whole = {name: torch.randn(rows, 3) for name, rows in ROWS.items()}
    return whole | {
        "columns": torch.arange(12.0).view(2, 6),
        "replicated": torch.arange(3.0),
        "plain": torch.arange(5.0),
    }


def test_two_ranks_write_what_one_reads_and_read_what_one_wrote(tmp_path):
    write_tensors(shards(_whole()), tmp_path / "one")
    spawn(_save_two, 2, tmp_path)
    assert same(read_whole(tmp_path / "two"), _whole())
    metadata = read_metadata(tmp_path / "two")
    chunks = {n: len(entry.chunks) for n, entry in metadata.state_dict_metadata.items()}
    assert chunks == {
        "even": 2,
        "uneven": 2,
        "one": 1,  # the other rank's part is empty and is not written
        "columns": 2,
        "replicated": 1,
        "plain": 1,
    }


def _fails_on_one(rank, world, folder):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard as Rows
    from torch.distributed.tensor import distribute_tensor

    mesh = init_device_mesh("cpu", (world,))
    tensor = distribute_tensor(torch.zeros(20000), mesh, [Rows(0)])
    if rank == 1:
        resource.setrlimit(resource.RLIMIT_FSIZE, (8192, resource.RLIM_INFINITY))
    with pytest.raises(OSError, match=r"rank 1: OSError: .*File too large"):
        write_tensors(shards({"a": tensor}), folder / "x", group=torch.distributed.group.WORLD)


def test_what_one_rank_cannot_write_is_an_error_of_all(tmp_path):
    spawn(_fails_on_one, 2, tmp_path)
    assert not (tmp_path / "x" / ".metadata").exists()

"""Condition records on the device: moved once, dropped by their bytes."""

from __future__ import annotations

import gc

import pytest
import torch

from drl.errors import BatchError
from drl.stages.upload import Records, make_batch, size_of
from drl.testing import make_pair
from drl.types import ConditionRecord

META = torch.device("meta")
"""Another device than the CPU that every machine has."""


def record(numbers: int = 4) -> ConditionRecord:
    tensors = {"text": torch.zeros(numbers), "pooled": torch.zeros(1)}
    return ConditionRecord(tensors=tensors, values={"length": 3})


def test_a_record_moves_once_and_keeps_what_is_no_tensor() -> None:
    records, one = Records(META), record()
    first = records.on_device(one)
    assert all(tensor.is_meta for tensor in first.tensors.values())
    assert first.values == {"length": 3}
    assert records.on_device(one) is first
    assert records.on_device(record()) is not first
    assert records.held == 2 * size_of(one) == 2 * 20


def test_a_record_that_is_there_is_handed_through() -> None:
    records, one = Records(torch.device("cpu")), record()
    assert records.on_device(one) is one
    assert records.held == 0


def test_the_bytes_are_bounded_and_those_used_last_stay() -> None:
    limit = 3 * size_of(record())
    records, known = Records(META, limit), [record() for _ in range(4)]
    first = [records.on_device(one) for one in known[:3]]
    assert records.on_device(known[0]) is first[0]
    records.on_device(known[3])
    assert records.held == limit
    assert records.on_device(known[0]) is first[0]
    assert records.on_device(known[1]) is not first[1], "used least, so it was dropped"
    large = record(1000)
    assert records.on_device(large) is records.on_device(large), "one that is too large alone stays"
    assert records.held == size_of(large)


def test_an_id_that_python_uses_again_is_not_taken_for_the_old_record() -> None:
    records = Records(META)
    for length in range(1, 200):
        found = records.on_device(record(length))
        assert found.tensors["text"].shape == (length,)
        gc.collect(0)


def test_memory_is_given_back() -> None:
    records, one = Records(META), record()
    first = records.on_device(one)
    records.clear()
    assert records.held == 0
    assert records.on_device(one) is not first


def test_scalars_land_under_their_names() -> None:
    values = [{"advantage": float(n), "sigma_next": 0.1 * n} for n in range(3)]
    pairs = [
        make_pair(id=(n, 0), sigma=0.5 + n, weight=float(n), values=v) for n, v in enumerate(values)
    ]
    batch = make_batch(pairs, torch.device("cpu"))
    assert batch.weight_B.tolist() == [0.0, 1.0, 2.0]
    assert batch.sigma_B.tolist() == [0.5, 1.5, 2.5]
    assert batch.timestep_B is not None
    assert batch.timestep_B.tolist() == [500.0, 1500.0, 2500.0]
    assert list(batch.values) == ["advantage", "sigma_next"]
    assert batch.values["advantage"].tolist() == [0.0, 1.0, 2.0]
    assert torch.equal(batch.values["sigma_next"], torch.tensor([0.0, 0.1, 0.2]))
    with pytest.raises(BatchError, match=r"'levels' .*\['advantage', 'sigma_next'\]"):
        batch.values["levels"]

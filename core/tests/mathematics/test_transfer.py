"""Uploads on devices that a machine without a GPU has: the CPU itself, and ``meta`` as another one."""

from __future__ import annotations

import pytest
import torch

from drl.mathematics.transfer import columns, is_on, moved, stacked

CPU, META = torch.device("cpu"), torch.device("meta")


@pytest.mark.parametrize(
    ("device", "expected"), [("cuda", True), ("cuda:1", True), ("cuda:0", False), ("cpu", False)]
)
def test_a_device_without_a_number_is_any_of_its_type(device: str, expected: bool) -> None:
    class Somewhere:
        device = torch.device("cuda:1")

    assert is_on(Somewhere(), torch.device(device)) is expected  # type: ignore[arg-type]


def test_nothing_is_copied_that_is_there_already() -> None:
    tensor = torch.randn(3)
    assert moved(tensor, CPU) is tensor
    there = moved(tensor, META)
    assert there.is_meta
    assert moved(there, META) is there


def test_rows_are_stacked_in_order_and_keep_their_dtype() -> None:
    rows = [torch.full((2, 3), float(n), dtype=torch.bfloat16) for n in range(4)]
    together = stacked(rows, CPU)
    assert together.dtype == torch.bfloat16
    assert together.shape == (4, 2, 3)
    assert together[:, 0, 0].tolist() == [0.0, 1.0, 2.0, 3.0]
    assert together.data_ptr() != rows[0].data_ptr()


def test_rows_of_two_devices_meet_on_the_third() -> None:
    assert stacked([torch.zeros(2), torch.zeros(2, device="meta")], META).is_meta


def test_rows_of_other_shapes_do_not_stack() -> None:
    with pytest.raises(RuntimeError, match="equal size"):
        stacked([torch.zeros(2), torch.zeros(3)], CPU)


def test_numbers_arrive_as_float32_columns() -> None:
    weights, sigmas = columns([[1.0, 0.0, 2.5], [0.1, 1e-7, 0.3]], CPU)
    assert weights.tolist() == [1.0, 0.0, 2.5]
    assert torch.equal(sigmas, torch.tensor([0.1, 1e-7, 0.3]))
    assert sigmas.dtype == torch.float32
    assert sigmas.is_contiguous()

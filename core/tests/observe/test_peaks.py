"""The table of published peaks: by the names that drivers report."""

from __future__ import annotations

import pytest

from drl.observe.peaks import TFLOPS, published_peak


@pytest.mark.parametrize(
    ("name", "tflops"),
    [
        ("NVIDIA H200", 989.4),
        ("NVIDIA H200 NVL", 835.5),
        ("NVIDIA H100 80GB HBM3", 989.4),
        ("NVIDIA H100 PCIe", 756.4),
        ("NVIDIA A100-SXM4-80GB", 312.0),
        ("NVIDIA A100-PCIE-40GB", 312.0),
        ("NVIDIA L40S", 362.1),
        ("NVIDIA L4", 121.0),
        ("NVIDIA GeForce RTX 4090", 165.2),
    ],
)
def test_a_card_is_found_by_the_name_that_its_driver_reports(name: str, tflops: float) -> None:
    assert published_peak(name) == tflops


@pytest.mark.parametrize(
    "name",
    [
        "NVIDIA A10G",
        "NVIDIA GeForce RTX 4090 Laptop GPU",
        "NVIDIA GeForce RTX 3090 Ti",
        "NVIDIA H100 80GB HBM3 MIG 3g.40gb",
        "AMD Instinct MI300X",
        "CPU",
        "",
    ],
)
def test_a_card_that_is_not_in_the_table_has_no_peak(name: str) -> None:
    assert published_peak(name) is None


def test_every_row_of_the_table_is_reached() -> None:
    assert [published_peak(beginning) for beginning, _ in TFLOPS] == [peak for _, peak in TFLOPS]

"""What cards promise: dense bf16 matrix products, as their makers publish it, for MFU.

Sources: NVIDIA's data sheets and architecture papers (A100 2021, A30 2022, L4 and L40S 2023, H100 and
H200 2024, Ada and Ampere GeForce 2022 and 2020, B200 in the Blackwell paper 2024), figures without
sparsity; GeForce cards with sums in float32. fp16 has the same figures.
"""

from __future__ import annotations

import re

TFLOPS = (
    ("NVIDIA B200", 2250.0),
    ("NVIDIA H200 NVL", 835.5),
    ("NVIDIA H200", 989.4),
    ("NVIDIA H100 NVL", 835.5),
    ("NVIDIA H100 PCIe", 756.4),
    ("NVIDIA H100", 989.4),
    ("NVIDIA GH200", 989.4),
    ("NVIDIA H20", 148.0),
    ("NVIDIA A100", 312.0),
    ("NVIDIA A30", 165.0),
    ("NVIDIA A10", 125.0),
    ("NVIDIA L40S", 362.1),
    ("NVIDIA L40", 181.0),
    ("NVIDIA L4", 121.0),
    ("NVIDIA RTX A6000", 154.8),
    ("NVIDIA GeForce RTX 4090", 165.2),
    ("NVIDIA GeForce RTX 3090", 71.0),
)
"""TFLOP/s by the beginning of the name that the driver reports; the first that fits counts."""


def published_peak(name: str) -> float | None:
    """Return TFLOP/s of a card by its name, such as "NVIDIA H100 80GB HBM3"; None for an unknown one.

    Names are compared by whole words: an A10G is no A10. Ti, SUPER and laptop cards are others too.
    """
    if re.search(r"\b(Ti|SUPER|Laptop|Max-Q|MIG)\b", name):
        return None
    for beginning, tflops in TFLOPS:
        if re.match(rf"{re.escape(beginning)}(?![A-Za-z0-9])", name):
            return tflops
    return None

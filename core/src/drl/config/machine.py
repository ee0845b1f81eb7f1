"""What this machine has, found without importing torch."""

from __future__ import annotations

import os
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path


@dataclass(frozen=True, slots=True)
class Machine:
    """``cuda``: a GPU is visible and the installed torch can use it."""

    cuda: bool = False


def detect() -> Machine:
    """Return this machine: driver, visible devices and the kind of torch decide about CUDA."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "0").strip()
    driver = Path("/proc/driver/nvidia/version").exists() or Path("/dev/nvidiactl").exists()
    return Machine(cuda=driver and visible not in {"", "-1", "none"} and not _torch_is_cpu_only())


def _torch_is_cpu_only() -> bool:
    try:
        return version("torch").endswith("+cpu")
    except PackageNotFoundError:
        return True

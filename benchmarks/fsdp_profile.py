"""Where the time of one step went: kernels by kind, how long the device had nothing to do, tables."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

KINDS = {
    "collective": r"nccl|ncclDevKernel",
    "optimizer": r"multi_tensor|adam|lpnorm|foreach",
    "attention": r"flash|fmha|sdpa|attention|cudnn_generated",
    "matmul": r"gemm|nvjet|cutlass|cublas|xmma|sm90_",
    "copy": r"memcpy|memset|copy|cat|split_with_sizes|chunk",
}
"""Kind of a kernel by the first pattern that its name holds; anything else is "other"."""
LARGEST = 20


@dataclass(frozen=True)
class Interval:
    """One kernel: its name, start and end in milliseconds."""

    name: str
    start: float
    end: float


@dataclass(frozen=True)
class Profile:
    """Milliseconds of a step by kind of kernel, idle time of the device, and the two tables."""

    kinds: dict[str, float]
    busy: float
    idle: float
    text: str


def profiled(step: Callable[[], None], device: str) -> Profile:
    """Run one step under torch's profiler; on a CPU only the table of operators is filled."""
    cuda = device.startswith("cuda")
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if cuda else [])]
    with profile(activities=activities) as profiler:
        step()
        if cuda:
            torch.cuda.synchronize()
    kernels = [
        Interval(event.name, event.time_range.start / 1e3, event.time_range.end / 1e3)
        for event in profiler.events() or ()
        # FSDP2 marks spans of its work on the device, which are no work themselves
        if event.device_type == DeviceType.CUDA and not event.is_user_annotation
    ]
    averages = profiler.key_averages()
    orders = ("self_cuda_time_total", "self_cpu_time_total") if cuda else ("self_cpu_time_total",)
    tables = (
        averages.table(sort_by=order, row_limit=LARGEST, max_name_column_width=90)
        for order in orders
    )
    return summary(kernels, "\n".join(tables))


def summary(kernels: list[Interval], text: str) -> Profile:
    """Sum up kernels: idle is the time between the first start and the last end without any."""
    busy = covered(kernels)
    span = max((k.end for k in kernels), default=0.0) - min((k.start for k in kernels), default=0.0)
    return Profile(kinds=by_kind(kernels), busy=busy, idle=span - busy, text=text)


def by_kind(kernels: Iterable[Interval]) -> dict[str, float]:
    """Return the milliseconds per kind of kernel; kernels of two streams count both."""
    times = dict.fromkeys([*KINDS, "other"], 0.0)
    for kernel in kernels:
        times[kind_of(kernel.name)] += kernel.end - kernel.start
    return times


def kind_of(name: str) -> str:
    """Return the kind of a kernel by its name."""
    found = (kind for kind, words in KINDS.items() if re.search(words, name, re.IGNORECASE))
    return next(found, "other")


def covered(kernels: Iterable[Interval]) -> float:
    """Return the length of the union of the intervals."""
    total, reached = 0.0, float("-inf")
    for kernel in sorted(kernels, key=lambda kernel: kernel.start):
        total += max(0.0, kernel.end - max(kernel.start, reached))
        reached = max(reached, kernel.end)
    return total

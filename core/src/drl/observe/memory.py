"""How much memory each phase of an iteration takes, read where one phase ends and the next begins.

On a CUDA device the figures are the allocator's: reading them neither waits for the device nor
allocates. On the CPU there is the resident set of the process, which has no peak by phase.
"""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

GIB = 2**30
STATM = Path("/proc/self/statm")
HEAD, PEAK, HELD = "perf/memory/", "_peak_gib", "_gib"
RESERVED = "perf/memory/reserved_gib"
NO_PHASE = "unaccounted"
"""Name under which the memory of the time between phases stands."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Reading:
    """Bytes that are held now, at most since the reading before (None: unknown), and reserved for more."""

    held: int
    peak: int | None = None
    reserved: int | None = None


class MemorySource(ABC):
    """Something that memory can be read from, as often as phases change."""

    @abstractmethod
    def read(self) -> Reading:
        """Return what is held; peaks count from the last call on."""


class CudaMemory(MemorySource):
    """The allocator of one CUDA device. Reading resets the allocator's peaks."""

    def __init__(self, device: str) -> None:
        import torch

        self._cuda = torch.cuda
        self._device = torch.device(device)

    def read(self) -> Reading:
        """Return the allocator's figures; zeros before anything was allocated."""
        if not self._cuda.is_initialized():
            return Reading(held=0, peak=0, reserved=0)
        # one call for all figures: each of torch's own shorthands makes the same table again
        found = self._cuda.memory_stats(self._device)
        self._cuda.reset_peak_memory_stats(self._device)
        return Reading(
            held=found.get("allocated_bytes.all.current", 0),
            peak=found.get("allocated_bytes.all.peak", 0),
            reserved=found.get("reserved_bytes.all.current", 0),
        )


class ResidentMemory(MemorySource):
    """The resident set of this process, from Linux's ``/proc``."""

    def __init__(self) -> None:
        self._page = os.sysconf("SC_PAGE_SIZE")

    def read(self) -> Reading:
        """Return the pages that are in memory now."""
        return Reading(held=int(STATM.read_text().split()[1]) * self._page)


class PhaseMemory:
    """Memory by phase over one iteration after another; ``charge`` is called where a phase ends."""

    def __init__(self, source: MemorySource) -> None:
        self._source = source
        self.start()

    def start(self) -> None:
        """Forget what was booked, and let peaks count from now on."""
        self._peaks: dict[str, int] = {}
        self._held: dict[str, int] = {}
        self._reserved: int | None = None
        self._source.read()

    def charge(self, phase: str | None) -> None:
        """Book what was held since the last call for the phase that ran; None: no phase did."""
        name = NO_PHASE if phase is None else phase
        reading = self._source.read()
        self._held[name] = reading.held
        if reading.peak is not None:
            self._peaks[name] = max(self._peaks.get(name, 0), reading.peak)
        if reading.reserved is not None:
            self._reserved = max(self._reserved or 0, reading.reserved)

    def finish(self) -> dict[str, float]:
        """Return the figures since ``start`` in GiB by metric name.

        ``perf/memory/<phase>_peak_gib``: the most that was held in the phase, ``perf/memory/<phase>_gib``:
        what was held at its end, ``perf/memory/reserved_gib``: the most that the allocator had in reserve
        where phases ended. Figures that the device does not tell are left out.
        """
        figures = {memory_key(name, peak=True): size / GIB for name, size in self._peaks.items()}
        figures |= {memory_key(name, peak=False): size / GIB for name, size in self._held.items()}
        if self._reserved is not None:
            figures[RESERVED] = self._reserved / GIB
        return figures


def phase_memory(device: str) -> PhaseMemory | None:
    """Return the memory of a device by phase; None where nothing tells it."""
    if device.startswith("cuda"):
        return PhaseMemory(CudaMemory(device))
    return PhaseMemory(ResidentMemory()) if device == "cpu" and STATM.is_file() else None


def memory_key(phase: str, *, peak: bool) -> str:
    """Return the metric name of a phase's memory: its peak, or what it holds at its end."""
    return f"{HEAD}{phase}{PEAK if peak else HELD}"


def memory_of(figures: Mapping[str, float], *, peak: bool) -> dict[str, float]:
    """Return GiB by phase name out of one row of metrics: peaks, or what was held at the end."""
    tail = PEAK if peak else HELD
    return {
        key.removeprefix(HEAD).removesuffix(tail): size
        for key, size in figures.items()
        if key.startswith(HEAD)
        and key.endswith(tail)
        and key.endswith(PEAK) == peak
        and key != RESERVED
    }

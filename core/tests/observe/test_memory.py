"""Memory by phase: what is booked for whom, and what the figures are called."""

from __future__ import annotations

import pytest
import torch

from drl.observe.memory import (
    GIB,
    NO_PHASE,
    CudaMemory,
    MemorySource,
    PhaseMemory,
    Reading,
    ResidentMemory,
    memory_key,
    memory_of,
    phase_memory,
)
from drl.observe.timing import Phases


class Tape(MemorySource):
    """Readings in the order in which they will be asked for, in GiB; counts how often that was."""

    def __init__(self, *readings: tuple[float, float | None, float | None]) -> None:
        self.readings = list(readings)
        self.asked = 0

    def read(self) -> Reading:
        self.asked += 1
        held, peak, reserved = self.readings.pop(0)
        return Reading(held=size(held), peak=whole(peak), reserved=whole(reserved))


def size(gib: float) -> int:
    return int(gib * GIB)


def whole(gib: float | None) -> int | None:
    return None if gib is None else size(gib)


def test_each_phase_gets_its_peak_and_what_it_held_at_its_end() -> None:
    memory = PhaseMemory(Tape((1, 9, 9), (2, 5, 6), (1.5, 7, 8)))
    memory.charge("rollout")
    memory.charge("train")
    assert memory.finish() == {
        "perf/memory/rollout_peak_gib": 5.0,
        "perf/memory/train_peak_gib": 7.0,
        "perf/memory/rollout_gib": 2.0,
        "perf/memory/train_gib": 1.5,
        "perf/memory/reserved_gib": 8.0,
    }


def test_what_came_before_the_start_belongs_to_no_phase() -> None:
    memory = PhaseMemory(Tape((1, 50, 60), (2, 3, 4), (2, 40, 40), (1, 2, 4)))
    memory.charge("rollout")
    memory.start()
    memory.charge("train")
    assert memory.finish() == {
        "perf/memory/train_peak_gib": 2.0,
        "perf/memory/train_gib": 1.0,
        "perf/memory/reserved_gib": 4.0,
    }


def test_a_phase_that_was_paused_has_the_larger_of_its_peaks() -> None:
    before, after = [(0, 0, 0)] * 2, [(1, 1, 9)] * 2
    tape = Tape(*before, (1, 2, 2), (3, 6, 9), (1, 4, 9), (1, 7, 9), *after)
    phases = Phases(lambda: 0.0, PhaseMemory(tape))
    with phases.phase("rollout"), phases.phase("encode"):
        pass
    peaks = memory_of(phases.finish(), peak=True)
    assert peaks == {"rollout": 7.0, "encode": 4.0, NO_PHASE: 2.0}


def test_memory_is_read_once_where_one_phase_ends_and_another_begins() -> None:
    tape = Tape(*[(0.0, 0.0, 0.0)] * 10)
    phases = Phases(lambda: 0.0, PhaseMemory(tape))
    before = tape.asked
    with phases.phase("rollout"):
        assert tape.asked == before + 1
    with phases.phase("train"):
        pass
    assert tape.asked == before + 4


def test_a_device_without_peaks_gives_no_peaks_rather_than_zeros() -> None:
    memory = PhaseMemory(Tape((1, None, None), (2, None, None)))
    memory.charge("train")
    assert memory.finish() == {"perf/memory/train_gib": 2.0}


def test_figures_are_read_back_by_phase_and_the_reserve_is_no_phase() -> None:
    row = {
        memory_key("train", peak=True): 31.5,
        memory_key("train", peak=False): 6.0,
        memory_key("update_weights", peak=False): 5.0,
        "perf/memory/reserved_gib": 33.0,
        "perf/train_time": 4.0,
    }
    assert memory_of(row, peak=True) == {"train": 31.5}
    assert memory_of(row, peak=False) == {"train": 6.0, "update_weights": 5.0}


def test_the_resident_set_grows_with_what_is_allocated() -> None:
    source = ResidentMemory()
    before = source.read()
    kept = torch.ones(64 * 2**20, dtype=torch.uint8)
    after = source.read()
    assert 0.9 * len(kept) < after.held - before.held < 2 * len(kept)
    assert after.peak is None
    assert after.reserved is None


def test_a_cuda_device_that_nobody_used_yet_holds_nothing() -> None:
    if torch.cuda.is_initialized():
        pytest.skip("CUDA is in use in this process")
    assert CudaMemory("cuda").read() == Reading(held=0, peak=0, reserved=0)


def test_the_device_decides_what_is_read() -> None:
    assert phase_memory("mps") is None
    assert phase_memory("cpu") is not None
    assert phase_memory("cuda:0") is not None

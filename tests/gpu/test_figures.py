"""Figures of memory and speed on the device: what phases hold, at what cost, without waiting for it."""

from __future__ import annotations

import json
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from e2e import run_here
from gpu.facts import record

from drl.bench.measure import Wanted, bench_recipe, measure
from drl.catalog import Catalog
from drl.errors import BadInput, OutOfMemory
from drl.observe.memory import GIB, memory_of, phase_memory
from drl.observe.peaks import published_peak
from drl.observe.timing import Phases

pytestmark = pytest.mark.gpu

MIB = 2**20
BLOCK = 256 * MIB


def test_a_peak_belongs_to_the_phase_that_had_it(device: str) -> None:
    torch.ones(1, device=device)
    phases = Phases(memory=phase_memory(device))
    with phases.phase("rollout"):
        held = torch.ones(BLOCK, dtype=torch.uint8, device=device)
        del held
    with phases.phase("train"):
        kept = torch.ones(BLOCK // 4, dtype=torch.uint8, device=device)
    figures = phases.finish()
    peaks = memory_of(figures, peak=True)
    if device == "cpu":
        assert peaks == {}
        assert memory_of(figures, peak=False).keys() >= {"rollout", "train"}
        return
    assert (peaks["rollout"] - peaks["train"]) * 1024 == pytest.approx(192, abs=4)
    ends = memory_of(figures, peak=False)
    assert (ends["train"] - ends["rollout"]) * 1024 == pytest.approx(64, abs=4)
    assert figures["perf/memory/reserved_gib"] >= peaks["rollout"]
    assert kept.sum().item() == BLOCK // 4


def test_reading_memory_is_cheap_and_waits_for_nothing(device: str) -> None:
    x = torch.randn(2048, 2048, device=device)
    phases = Phases(memory=phase_memory(device))
    rounds = 100
    if device != "cpu":
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("error")
    try:
        for _ in range(3):
            x = x @ x
        began = time.perf_counter()
        for _ in range(rounds):
            with phases.phase("train"):
                pass
        spent = time.perf_counter() - began
    finally:
        if device != "cpu":
            torch.cuda.set_sync_debug_mode("default")
    record("figures", memory_reading_us=round(spent / (2 * rounds) * 1e6, 1))
    assert spent / (2 * rounds) < 2e-3


def test_a_run_tells_memory_speed_and_use_of_the_card(
    recipe: Path, tmp_path: Path, device: str, bf16: tuple[str, ...]
) -> None:
    run_here(recipe, tmp_path / "run", *bf16, "eval.datasets=[]", "train.num_rollout=2")
    rows = [json.loads(line) for line in (tmp_path / "run/metrics.jsonl").read_text().splitlines()]
    last = rows[-1]
    record("figures", **{name: last[name] for name in last if name.startswith("perf/")})
    assert last["perf/train_tflops"] > 0
    assert last["perf/rollout_tflops"] > 0
    assert memory_of(last, peak=device != "cpu").keys() >= {"rollout", "train", "update_weights"}
    known = device != "cpu" and published_peak(torch.cuda.get_device_name()) is not None
    assert ("perf/train_mfu" in last) == known
    if known:
        assert 0 < last["perf/train_mfu"] < 1


def test_a_bench_on_a_smaller_card_names_the_phase_that_does_not_fit(
    recipe: Path,
    tmp_path: Path,
    device: str,
    bf16: tuple[str, ...],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("DRL_RATES", str(tmp_path / "rates.json"))
    catalog = Catalog.load()
    sets = (*bf16, "sampling.width=64", "sampling.height=64")
    whole = Wanted(recipe=recipe, sets=sets, iterations=2)
    if device == "cpu":
        with pytest.raises(BadInput, match="runs on the CPU"):
            measure(bench_recipe(whole, catalog), replace(whole, memory=GIB), catalog)
        return
    found = measure(bench_recipe(whole, catalog), whole, catalog)
    assert found.peaks.keys() >= {"rollout", "train"}
    small = replace(whole, memory=int(0.7 * max(found.peaks.values()) * GIB))
    with pytest.raises(OutOfMemory, match="out of memory in "):
        measure(bench_recipe(small, catalog), small, catalog)
    again = measure(bench_recipe(whole, catalog), whole, catalog)  # the limit is gone
    record("figures", bench_peaks_gib=dict(again.peaks))

"""Fixtures of the tests that need a GPU; ``DRL_GPU_TEST_DEVICE=cpu`` runs them on the CPU instead."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from e2e import write_recipe
from gpu.facts import FACTS_VARIABLE, record
from gpu.runs import free

DEVICE = os.environ.get("DRL_GPU_TEST_DEVICE", "cuda")
OUTCOMES = ("passed", "failed", "error", "skipped")


@pytest.fixture(scope="session")
def device() -> str:
    """The device under test, as ``cluster.device`` names it."""
    if DEVICE.startswith("cuda") and not torch.cuda.is_available():
        pytest.skip("no CUDA device is visible; DRL_GPU_TEST_DEVICE=cpu runs this on the CPU")
    return DEVICE


@pytest.fixture
def recipe(tmp_path: Path, checkpoint: Path) -> Path:
    """The tiny recipe of the end-to-end tests."""
    return write_recipe(tmp_path, checkpoint)


@pytest.fixture
def fp32(device: str) -> tuple[str, ...]:
    """Settings for the device under test in float32."""
    return (f"cluster.device={device}", "train.forward_dtype=fp32")


@pytest.fixture
def bf16(device: str) -> tuple[str, ...]:
    """Settings for the device under test in bfloat16, which is what a GPU runs by default."""
    return (f"cluster.device={device}", "train.forward_dtype=bf16")


@pytest.fixture(autouse=True)
def _memory() -> Iterator[None]:
    yield
    free()


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Record how many tests had which outcome, and which failed, for the table."""
    if FACTS_VARIABLE not in os.environ:
        return
    stats = terminalreporter.stats
    failed = [*stats.get("failed", []), *stats.get("error", [])]
    bench = any("bench_" in argument for argument in terminalreporter.config.args)
    record(
        "bench" if bench else "tests",
        **{outcome: len(stats.get(outcome, [])) for outcome in OUTCOMES},
        seconds=round(sum(report.duration for report in stats.get("passed", [])), 1),
        failures={report.nodeid.rpartition("/")[2]: _reason(report) for report in failed},
        skips=sorted({report.longrepr[2] for report in stats.get("skipped", [])}),
    )


def _reason(report: pytest.TestReport) -> str:
    lines = [line for line in str(report.longreprtext).splitlines() if line.startswith("E ")]
    return lines[0].removeprefix("E").strip() if lines else report.longreprtext[-200:]

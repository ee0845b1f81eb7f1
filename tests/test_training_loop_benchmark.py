"""benchmarks/training_loop.py at a small size on a CPU: what its rows say, and the line through its steps."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "benchmarks"))

import training_loop  # noqa: E402


def measured(
    folder: Path, monkeypatch: pytest.MonkeyPatch, *arguments: str
) -> list[dict[str, Any]]:
    """Run the script in this process; return the rows it wrote."""
    words = ("--size", "small", "--device", "cpu", "--out", str(folder), "--warmup", "0")
    monkeypatch.setattr(sys, "argv", ["training_loop.py", *words, "--quick", *arguments])
    training_loop.main()
    rows: list[dict[str, Any]] = json.loads((folder / "training_loop.json").read_text())["rows"]
    return rows


def test_each_case_is_beside_its_bare_passes_and_steps_grow(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    counts = ("--micro-batches", "1", "3", "--repeats", "1", "--cases", "plain", "guidance")
    rows = measured(tmp_path, monkeypatch, "--eager", *counts)
    plain, guided = (row for row in rows if "ratio" in row)
    assert (plain["case"], guided["case"]) == ("plain", "guidance")
    for row in (plain, guided):
        assert row["ratio"] == pytest.approx(row["product ms"] / row["bare ms"])
        assert row["pairs/s"] == pytest.approx(2e3 / row["product ms"]), "micro-batches of 2 pairs"
        assert row["peak GiB"] is None
        assert row["host ms"] > 0
    work = [row["TFLOP/s"] / row["pairs/s"] for row in (plain, guided)]
    assert work[1] == pytest.approx(2 * work[0]), "both predictions of guidance are trained through"
    steps = [row for row in rows if "off %" in row]
    assert [row["micro-batches"] for row in steps] == [1, 3]
    assert steps[1]["ms"] > steps[0]["ms"]
    printed = capsys.readouterr().out
    assert "bare ms" in printed
    assert "micro-batches" in printed


def test_the_line_through_steps_by_hand() -> None:
    rows = [{"micro-batches": n, "ms": ms} for n, ms in ((1, 30.0), (2, 50.0), (3, 70.0))]
    found = training_loop.with_line(rows)
    assert [row["line ms"] for row in found] == pytest.approx([30.0, 50.0, 70.0])
    assert [row["off %"] for row in found] == pytest.approx([0.0] * 3)
    bent = training_loop.with_line([*rows, {"micro-batches": 4, "ms": 110.0}])
    assert [row["line ms"] for row in bent] == pytest.approx([26.0, 52.0, 78.0, 104.0])
    assert bent[3]["off %"] == pytest.approx(100 * (110 / 104 - 1))
    assert training_loop.with_line(rows[:1]) == rows[:1]


def test_samples_of_a_prompt_share_their_conditions() -> None:
    size = training_loop.SCALES["small"]
    samples = training_loop.samples_of(size, 10, "cpu")
    records = [id(sample.condition) for sample in samples]
    assert len(set(records[:8])) == 1
    assert len(set(records)) == 2
    assert len({id(sample.negative) for sample in samples}) == 1
    assert all(sample.trajectory is not None for sample in samples)

"""benchmarks/training_loop.py at a small size on a CPU: what its rows say, and the line through its steps."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "benchmarks"))

import common  # noqa: E402
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
    loops = {row["loop"]: row for row in rows if "loop" in row}
    assert list(loops) == [
        f"{c}: {n}" for c in ("plain", "guidance") for n in ("product", "script")
    ]
    for row in (plain, guided):
        ours, script = (loops[f"{row['case']}: {name}"] for name in ("product", "script"))
        assert ours["loop ms"] == row["product ms"]
        assert ours["loop pairs/s"] == row["pairs/s"]
        assert ours["of the product"] == 1.0
        assert script["of the product"] == pytest.approx(script["loop ms"] / ours["loop ms"])
        assert script["loop pairs/s"] == pytest.approx(2e3 / script["loop ms"])
    steps = [row for row in rows if "off %" in row]
    assert [row["micro-batches"] for row in steps] == [1, 3]
    for row in steps:
        assert row["line ms"] == pytest.approx(row["ms"]), "a line goes through two points"
    printed = capsys.readouterr().out
    assert "bare ms" in printed
    assert "guidance: script" in printed
    assert "micro-batches" in printed


def test_without_the_plain_loop_there_is_no_row_of_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ("--eager", "--no-plain", "--micro-batches", "1", "--repeats", "1", "--cases", "plain")
    rows = measured(tmp_path, monkeypatch, *words)
    assert not any("loop" in row for row in rows)
    assert "script" not in capsys.readouterr().out


def test_compiled_outputs_are_beside_eager_ones(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ("--compiler", "aot_eager", "--no-plain", "--micro-batches", "1", "--repeats", "1")
    rows = measured(tmp_path, monkeypatch, *words, "--cases", "plain")
    (row,) = (row for row in rows if "graphs" in row)
    # this compiler runs the operators of eager mode
    assert (row["unexpected"], row["apart mean"], row["apart max"]) == (0, 0.0, 0.0)
    assert row["graphs"] > 0
    assert 0.1 < row["deviation"] < 2.0
    assert "apart mean" in capsys.readouterr().out


def test_a_work_that_does_not_fit_is_told_and_others_go_on(
    capsys: pytest.CaptureFixture[str],
) -> None:
    def too_large() -> None:
        raise torch.OutOfMemoryError("tried to allocate 90.00 GiB")

    assert not common.fits(too_large, "guidance: the plain loop")
    said = "guidance: the plain loop does not fit: tried to allocate 90.00 GiB"
    assert said in capsys.readouterr().err
    assert common.fits(lambda: None, "another")


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

"""The result of a probe as text, JSON, CSV and picture."""

from __future__ import annotations

import csv
import io
import json
import math
import xml.etree.ElementTree as ET
from dataclasses import replace
from pathlib import Path

import pytest

from drl.align.changes import Finding
from drl.align.measure import RowsFigures, StepFigures
from drl.align.probe import Alignment
from drl.align.show import as_csv, as_json, as_svg, conclusion, lines, number, write
from drl.observe.chart import Series, line_chart
from drl.observe.svg import drawn

FACTS = {
    "name": "tiny",
    "family": "sd3",
    "engine": "local",
    "loss": "policy_loss",
    "sde": "cps",
    "device": "cpu",
    "forward_dtype": "fp32",
    "guidance_scale": 4.5,
    "batched_guidance": False,
    "micro_batch_size": 4,
    "lora": "random",
    "dropout": False,
    "engine_options": {"rows": 4},
}


def step(number: int, size: float, output: float = math.nan) -> StepFigures:
    return StepFigures(
        step=number,
        sigma=1.0 - 0.25 * number,
        pairs=8,
        log_prob_mean=size / 2,
        log_prob_max=size,
        ratio_mean=size / 2,
        ratio_max=size,
        output_mean=output,
        output_max=output,
        output_rel=output,
    )


def finding(name: str, verdict: str, mean: float = 0.0) -> Finding:
    return Finding(name=name, meaning=f"because of {name}", verdict=verdict, mean=mean, max=mean)


FOUND = Alignment(
    facts=FACTS,
    steps=(step(0, 2e-4, 0.5), step(1, 0.0, 0.25)),
    pairs=16,
    mean=5e-5,
    max=2e-4,
    limit=1e-5,
    rows=(
        RowsFigures(rows=1, mean=5e-5, max=2e-4, spread=0.0),
        RowsFigures(rows=8, mean=0.0, max=0.0, spread=2e-4),
    ),
    findings=(finding("forwards of 8 rows", "cause"), finding("other", "none", 5e-5)),
    other_settings=("different schedules\n  rollout: [1]",),
)


def test_a_reader_of_the_terminal_learns_all_of_it() -> None:
    text = [*lines(FOUND)]
    page = "\n".join(text)
    assert "tiny: sd3 + policy_loss + cps, engine local, fp32 on cpu" in page
    assert "guidance 4.5 in two forwards; 16 pairs in micro-batches of 4" in page
    assert "adapters start random" in page
    assert "   0  1.0000  1.00e-04   2.00e-04" in page
    assert "   1  0.7500  0.0        0.0" in page
    assert "max 2.00e-04: ABOVE trust.max_log_prob_diff = 1.0e-05" in page
    assert "cause: forwards of 8 rows\n  because of forwards of 8 rows" in page
    assert "the rows alone move log-probs by 2.00e-04" in page
    assert "  rollout: [1]" in page
    assert all(len(line) <= 100 for line in text)


@pytest.mark.parametrize(
    ("value", "text"), [(0.0, "0.0"), (1e-30, "1.00e-30"), (math.nan, "nan"), (math.inf, "inf")]
)
def test_only_equality_is_written_as_zero(value: float, text: str) -> None:
    assert number(value) == text


def test_conclusions() -> None:
    assert "exactly 0.0 at every step" in conclusion(replace(FOUND, max=0.0, mean=0.0))
    assert "within trust.max_log_prob_diff" in conclusion(replace(FOUND, max=1e-6))
    assert "nan: ABOVE" in conclusion(replace(FOUND, max=math.nan))
    assert not replace(FOUND, max=math.nan).within
    assert replace(FOUND, max=1e-5).within


def test_without_a_cause_it_says_unknown_and_what_was_tried() -> None:
    found = replace(FOUND, findings=(finding("other", "none", 1.0), finding("odd", "failed")))
    page = "\n".join(lines(found))
    assert "cause: unknown" in page
    assert "odd" in page
    assert "cannot run here" in page
    part = replace(FOUND, findings=(finding("half", "part", 1e-5),))
    assert "cause (of a part): half" in "\n".join(lines(part))


def test_what_was_not_tried_says_why_and_rows_say_that_there_was_no_dropout() -> None:
    left_out = finding("attention kernels", "untried")
    page = "\n".join(lines(replace(FOUND, findings=[left_out])))
    assert "attention kernels" in page
    assert "not tried\n    because of attention kernels" in page
    assert "dropout masks" not in page
    dropping = replace(FOUND, facts={**FACTS, "dropout": True})
    assert "in evaluation mode: each number of rows" in "\n".join(lines(dropping))


def test_json_holds_no_nan_and_all_the_figures(tmp_path: Path) -> None:
    steps = (step(0, math.nan), step(1, math.inf))
    found = replace(FOUND, max=math.nan, steps=steps)
    made = write(found, tmp_path)
    assert [path.name for path in made] == ["align.json", "align.csv", "align.svg"]
    text = made[0].read_text()
    held = json.loads(text, parse_constant=lambda name: pytest.fail(f"{name} is no JSON"))
    assert held["log_prob_max_abs_diff"] is None
    assert held["steps"][0]["log_prob_max"] is None
    assert held["causes"] == ["forwards of 8 rows"]
    assert held["facts"]["engine_options"] == {"rows": 4}
    assert as_json(FOUND)["rows"][1] == {"rows": 8, "mean": 0.0, "max": 0.0, "spread": 2e-4}


def test_csv_has_a_row_per_step() -> None:
    rows = [*csv.DictReader(io.StringIO(as_csv(FOUND.steps)))]
    assert [row["step"] for row in rows] == ["0", "1"]
    assert float(rows[0]["log_prob_max"]) == 2e-4


def test_the_picture_has_a_chart_for_what_is_known() -> None:
    root = ET.fromstring(as_svg(FOUND))
    words = "".join(root.itertext())
    assert "|Δ model output|" in words
    lines = [item for item in root.iter() if item.tag.endswith("polyline")]
    assert len(lines) == 6
    without = replace(FOUND, steps=(step(0, 1e-4), step(1, 2e-4)))
    assert "model output" not in as_svg(without)
    ET.fromstring(as_svg(replace(FOUND, steps=(step(0, math.nan),))))


def test_a_drawing_escapes_what_it_is_given() -> None:
    chart = line_chart([Series(name="a<b", points=[(0.0, 1.0), (1.0, 2.0)])], "x & y")
    root = ET.fromstring(drawn([("<script>", chart, ["a<b"])]))
    assert {"<script>", "a<b", "x & y"} <= set(root.itertext())
    assert ET.fromstring(drawn([])).tag.endswith("svg")

"""benchmarks/one_gpu.py: which cases run, what their rows say, and that nothing of an ended case is left."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from argparse import Namespace
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from blank_pipeline import write_blank
from gpu.pipelines import MEDIUM

from drl.catalog import Catalog
from drl.config import load_recipe

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "benchmarks"))

import one_gpu  # noqa: E402
from limited import ended, run_limited  # noqa: E402

FEW = (
    "rollout.n_samples_per_prompt=2",
    "rollout.microgroup_size=2",
    "train.global_batch_size=8",
    "sampling.num_steps=4",
    "sde.num_steps=4",
    "sde.sde_window.range=[0, 4]",
)
LEAVES_ONE = """
import os, signal, subprocess, sys
signal.signal(signal.SIGTERM, signal.SIG_IGN)
sleep = [sys.executable, "-c", "import time; time.sleep(600)"]
child = subprocess.Popen(sleep, start_new_session=True)
open(sys.argv[1], "w").write(str(child.pid))
"""


def measured(
    folder: Path, monkeypatch: pytest.MonkeyPatch, *arguments: str
) -> list[dict[str, Any]]:
    """Run the script at the small size; return the rows it wrote."""
    words = ("--size", "small", "--device", "cpu", "--out", str(folder / "out"))
    monkeypatch.setattr(sys, "argv", ["one_gpu.py", *words, *arguments])
    monkeypatch.chdir(folder)
    one_gpu.main()
    written = json.loads((folder / "out" / "one_gpu.json").read_text())
    rows: list[dict[str, Any]] = written["rows"]
    return rows


def script(folder: Path, text: str) -> list[str]:
    """Return the words that run a text of Python, and name a file for it."""
    file = folder / "case.py"
    file.write_text(text)
    return [sys.executable, str(file), str(folder / "child")]


def test_a_command_that_ends_in_time_gives_its_exit_code() -> None:
    assert run_limited([sys.executable, "-c", "raise SystemExit(3)"], None) == 3
    assert run_limited([sys.executable, "-c", ""], 60.0) == 0


def test_one_that_takes_longer_is_ended_with_all_that_it_started(tmp_path: Path) -> None:
    words = script(tmp_path, LEAVES_ONE + "child.wait()\n")
    began = time.monotonic()
    assert run_limited(words, 2.0) is None
    assert time.monotonic() - began < 20
    assert ended(int((tmp_path / "child").read_text()))


def test_a_process_that_runs_has_not_ended_and_one_that_is_not_waited_for_has() -> None:
    process = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    assert not ended(process.pid)
    process.kill()
    deadline = time.monotonic() + 20
    while not ended(process.pid):
        assert time.monotonic() < deadline
        time.sleep(0.01)
    assert process.returncode is None  # a zombie still
    process.communicate()
    assert ended(process.pid)


def test_what_a_failed_command_leaves_behind_ends_too(tmp_path: Path) -> None:
    words = script(tmp_path, LEAVES_ONE + "sys.exit(7)\n")
    assert run_limited(words, 60.0) == 7
    assert ended(int((tmp_path / "child").read_text())), "it is in a session of its own, an orphan"


def test_align_is_eight_ways_and_words_choose_among_all_cases() -> None:
    names = [case.name for case in one_gpu.chosen("align")]
    assert len(names) == 8
    assert names[0] == "align-plain-eager-merged"
    assert [case.name for case in one_gpu.chosen("growth,24gb,growth")] == ["growth", "24gb"]
    eager = [case.name for case in one_gpu.chosen("align-*-eager-*")]
    assert eager == [name for name in names if "eager" in name]
    assert len(one_gpu.chosen("align-guidance")) == 4
    with pytest.raises(ValueError, match="nothing is named 'algn'; there are iteration, "):
        one_gpu.chosen("iteration,algn")


@pytest.mark.parametrize("case", one_gpu.CASES.values(), ids=lambda case: case.name)
def test_a_case_is_a_sound_recipe_at_its_real_size(case: one_gpu.Case, tmp_path: Path) -> None:
    write_blank(tmp_path / "pipeline", MEDIUM)
    options = Namespace(size="medium", device="cuda", iterations=3)
    words = one_gpu.words_of(case, options, tmp_path, tmp_path / "figures.json")
    given = [value for word, value in pairwise(words) if word == "--set"]
    varied = [value for word, value in pairwise(words) if word == "--vary"]
    key, _, values = varied[0].partition("=") if varied else ("", "", "")
    recipe = one_gpu.SD3 / case.recipe
    for value in values.split(","):
        sets = [*given, *([f"{key}={value}"] if key else [])]
        load_recipe(recipe, sets=sets, catalog=Catalog.load())


@pytest.mark.parametrize("case", one_gpu.chosen("align"), ids=lambda case: case.name)
def test_a_comparison_asks_for_what_its_name_says(case: one_gpu.Case, tmp_path: Path) -> None:
    options = Namespace(size="medium", device="cuda", iterations=3)
    words = one_gpu.words_of(case, options, tmp_path, tmp_path / case.name / "align.json")
    sets = dict(word.split("=", 1) for word in words if "=" in word)
    _, guidance, blocks, adapters = case.name.split("-")
    assert sets["sampling.guidance_scale"] == ("4.5" if guidance == "guidance" else "1")
    compiled = "true" if blocks == "compiled" else "false"
    assert sets["train.compile"] == sets["rollout.local.compile"] == compiled
    assert sets["rollout.local.adapters"] == adapters
    assert sets["train.forward_dtype"] == "bf16"
    assert ("--no-causes" in words) == (blocks == "compiled")
    assert words[words.index("--out") + 1] == str(tmp_path / case.name)


def test_arguments_of_a_real_card_are_left_out_at_the_small_size(tmp_path: Path) -> None:
    case = one_gpu.CASES["24gb"]
    for size, there in (("medium", True), ("small", False)):
        options = Namespace(size=size, device="cpu", iterations=3)
        words = one_gpu.words_of(case, options, tmp_path, tmp_path / "24gb.json")
        assert ("--memory" in words) == there
        assert ("sampling.height=64" in words) != there


def step(number: int, mean: float | None, largest: float | None) -> dict[str, Any]:
    return {
        "step": number,
        "log_prob_mean": mean,
        "log_prob_max": largest,
        "output_max": 10 * largest if largest is not None else None,
    }


def test_a_comparison_is_one_row_with_each_step_by_hand() -> None:
    made = {
        "pairs": 16,
        "log_prob_mean_abs_diff": 2e-5,
        "log_prob_max_abs_diff": 4e-4,
        "exact": False,
        "within": True,
        "causes": ["adapters merged into the weights", "another"],
        "steps": [step(0, 1e-5, 2e-5), step(3, 3e-5, 4e-4)],
    }
    row = one_gpu.aligned("align-x", made)
    assert (row["pairs"], row["mean"], row["max"]) == (16, 2e-5, 4e-4)
    assert row["output max"] == pytest.approx(4e-3)
    assert row["within"] == "yes"
    assert row["causes"] == "adapters merged into the weights; another"
    assert (row["mean 0"], row["mean 3"], row["max 0"], row["max 3"]) == (1e-5, 3e-5, 2e-5, 4e-4)
    broken = {**made, "within": False, "causes": [], "steps": [step(0, None, None)]}
    other = one_gpu.aligned("align-y", broken)
    assert (other["within"], other["causes"], other["output max"]) == ("no", None, None)
    tables = one_gpu.columns_of([row, other, {"case": "iteration", "failed": "exit code 2"}])
    assert ["case", "mean 0", "mean 3"] in tables
    assert ["case", "max 0", "max 3"] in tables
    assert tables[-1] == ["case", "failed"]
    assert not any("iteration s" in columns for columns in tables), "no bench has figures"


def test_a_case_that_fails_is_shown_and_the_others_are_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    bad = replace(one_gpu.CASES["iteration"], name="bad", sets=("no.such=1",))
    few = replace(one_gpu.CASES["align-plain-eager-applied"], name="few")
    few = replace(few, sets=(*few.sets, *FEW), arguments=("--samples", "2", "--no-causes"))
    for case in (bad, few):
        monkeypatch.setitem(one_gpu.CASES, case.name, case)
    rows = measured(tmp_path, monkeypatch, "--cases", "bad,few")
    failed, found = rows
    assert failed == {"case": "bad", "failed": "exit code 2"}
    assert found["within"] == "exact"
    assert found["pairs"] == 8
    assert [found[f"{figure} {n}"] for figure in ("mean", "max") for n in range(4)] == [0.0] * 8
    printed = capsys.readouterr().out
    assert "bad   exit code 2" in printed


def test_a_growth_that_takes_too_long_leaves_the_values_that_were_done(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench = {
        "step_seconds": 2.0,
        "seconds": {"rollout": 1.25},
        "beside": {"reward": 0.75, "reward_wait": 0.25},
        "speed": {},
        "peak_gib": {},
        "predicted": {"seconds": {"rollout": 1.5}, "peak_bytes": {}},
    }
    figures = tmp_path / "growth.json"
    words = script(
        tmp_path,
        f"import pathlib, time\npathlib.Path({str(figures)!r}).write_text({json.dumps([bench])!r})\n"
        "time.sleep(600)\n",
    )
    monkeypatch.setattr(one_gpu, "words_of", lambda *_: words)
    options = Namespace(size="small", device="cpu", iterations=2, limit=2.0)
    row, failed = one_gpu.measured(one_gpu.CASES["growth"], options, tmp_path)
    assert (row["iteration s"], row["plan rollout s %"]) == (2.0, pytest.approx(20.0))
    assert (row["reward s"], row["reward_wait s"]) == (0.75, 0.25)
    assert failed["failed"].startswith("ended after ")


@pytest.mark.parametrize("name", ["iteration", "align-plain-eager-merged"])
def test_a_case_that_takes_too_long_is_ended_and_shown(name: str, tmp_path: Path) -> None:
    options = Namespace(size="small", device="cpu", iterations=2, limit=0.3)
    (row,) = one_gpu.measured(one_gpu.CASES[name], options, tmp_path)
    assert row["case"] == name
    assert row["failed"].startswith("ended after ")


@pytest.mark.slow
def test_benches_and_comparisons_run_at_the_small_size(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    cases = "iteration,24gb,growth,align-plain-eager-merged,align-guidance-eager-applied"
    rows = measured(tmp_path, monkeypatch, "--cases", cases, "--iterations", "2")
    found = {row["case"]: row for row in rows}
    assert not any("failed" in row for row in rows), rows
    for name in ("iteration", "24gb", "growth"):
        assert found[name]["whole s"] > found[name]["iteration s"] > found[name]["rollout s"] > 0
        assert found[name]["images/s"] > 0
    merged = found["align-plain-eager-merged"]
    assert 0 < merged["mean"] < merged["max"] < 1e-2
    assert "adapters merged into the weights" in merged["causes"]
    assert found["align-guidance-eager-applied"]["within"] == "exact"
    printed = capsys.readouterr().out
    assert "images/s" in printed
    assert "mean 9" in printed

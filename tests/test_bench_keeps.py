"""What a bench keeps: rates and figures that cannot be written, and rewards that a rollout waits for."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from e2e import write_recipe
from small_plan import prediction

from drl.bench import rates as bench_rates
from drl.bench.measure import Bench, Host, beside_of, ranges, times_of
from drl.bench.table import as_json, phase_rows
from drl.observe import files
from drl.plan.rates import DRIVER, FORWARD, read_table

Drl = Callable[..., tuple[int, str, str]]


@pytest.fixture
def recipe(tmp_path: Path, checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("DRL_RATES", str(tmp_path / "rates.json"))
    return write_recipe(tmp_path, checkpoint)


def test_rates_that_cannot_be_kept_are_refused_before_anything_is_measured(
    recipe: Path, drl: Drl, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DRL_RATES", "/proc/nope/rates.json")
    code, out, err = drl("bench", str(recipe), "--iterations", "2")
    assert (code, out) == (2, "")
    for word in ("/proc/nope/rates.json", "DRL_RATES", "--no-record"):
        assert word in err


def test_figures_that_cannot_be_written_are_refused_before_anything_is_measured(
    recipe: Path, drl: Drl
) -> None:
    code, out, err = drl("bench", str(recipe), "--json", "/proc/x.json")
    assert (code, out) == (2, "")
    assert "--json: /proc/x.json cannot be written" in err


def test_a_disk_that_fills_up_meanwhile_costs_neither_tables_nor_later_values(
    recipe: Path, tmp_path: Path, drl: Drl, monkeypatch: pytest.MonkeyPatch
) -> None:
    figures, real = tmp_path / "figures.json", files.write_json_atomic

    def full(*_: Any) -> Path:
        raise OSError(28, "No space left on device")

    def full_for_figures(path: Path, value: object) -> None:
        (full if path == figures else real)(path, value)

    monkeypatch.setattr(files, "write_json_atomic", full_for_figures)
    monkeypatch.setattr(bench_rates, "record_run", full)
    arguments = ("--iterations", "2", "--json", str(figures))
    vary = ("--vary", "train.micro_batch_size=2,8")
    code, out, err = drl("bench", str(recipe), *arguments, *vary)
    assert code == 1
    assert out.count("iteration 2/2") == 2
    assert "off the line" in out, "the table"
    assert err.count("no rates were kept: [Errno 28]") == 2
    assert f"--json: the figures are not in {figures}" in err
    assert "internal error" not in err


def bench_of(**rewards: float) -> Bench:
    """A bench of 3 s of rollout, 2 s of training and 0.5 s of the driver, half more or less of all."""
    middle = {
        "perf/rollout_time": 3.0,
        "perf/train_time": 2.0,
        "perf/unaccounted_time": 0.5,
        "perf/step_time": 5.5,
        **{f"perf/{name}": seconds for name, seconds in rewards.items()},
    }
    seen = [{name: share * value for name, value in middle.items()} for share in (0.5, 1.5)]
    return Bench(
        name="made",
        host=Host(device="NVIDIA H200", torch="2.11.0", dtype="bf16", compiled=True),
        iterations=2,
        start_seconds=9.0,
        first={"perf/step_time": 60.0},
        middle=middle,
        ranges=ranges([times_of(row) | beside_of(row) for row in seen]),
    )


def rewarded() -> Bench:
    """Its rollout waited 2 s for rewards of 2.5 s."""
    return bench_of(**{"overlapped/reward_time": 2.5, "reward_wait_seconds": 2.0})


def test_rewards_stand_below_the_iteration_that_they_are_no_part_of() -> None:
    assert phase_rows(rewarded())[-3:] == [
        ("iteration", "5.500 s", "2.750 – 8.250", "", ""),
        ("rewards, beside the rollout", "2.500 s", "1.250 – 3.750", "", ""),
        ("waited for rewards", "2.000 s", "1.000 – 3.000", "", ""),
    ]
    found = as_json(rewarded())
    assert found["beside"] == {"reward": 2.5, "reward_wait": 2.0}
    assert "reward" not in found["seconds"]
    assert as_json(bench_of())["beside"] == {}


def test_what_was_waited_for_rewards_is_no_rate_of_the_card(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DRL_RATES", str(tmp_path / "rates.json"))
    planned = prediction()
    file = bench_rates.record(planned, rewarded())
    assert file is not None
    (rows,) = read_table(file).rows.values()
    found = {one.kind: one.value for one in rows}
    assert found[FORWARD] * planned.work.sampling_calls == pytest.approx(1.0)
    assert found[DRIVER] == pytest.approx(0.5)


def test_a_bench_with_the_rewards_of_the_recipe_says_what_they_took(
    recipe: Path, tmp_path: Path, drl: Drl
) -> None:
    figures = tmp_path / "figures.json"
    arguments = ("--iterations", "2", "--no-record", "--rewards", "recipe", "--json", str(figures))
    code, out, err = drl("bench", str(recipe), *arguments)
    assert code == 0, err
    assert "rewards, beside the rollout" in out
    assert "waited for rewards" in out
    found = json.loads(figures.read_text())
    assert found["beside"]["reward"] > 0
    assert found["beside"]["reward_wait"] >= 0

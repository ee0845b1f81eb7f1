"""``drl bench`` on a tiny pipeline: what it shows, what it leaves behind, what it teaches the planner."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from e2e import run_here, write_recipe

from drl.bench.growth import Growth, Varied, growths, varied
from drl.bench.measure import Bench, Host, Wanted, bench_recipe, measure, ranges, times_of
from drl.bench.rewards import synthetic
from drl.bench.table import compared_rows, growth_rows, memory_title, phase_rows, speed_rows
from drl.catalog import Catalog
from drl.config import load_recipe
from drl.errors import BadInput
from drl.testing import make_sample

Drl = Callable[..., tuple[int, str, str]]

HOST = Host(device="NVIDIA H200", torch="2.11.0", dtype="bf16", compiled=True)


@pytest.fixture
def recipe(tmp_path: Path, checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("DRL_RATES", str(tmp_path / "rates.json"))
    return write_recipe(tmp_path, checkpoint)


def bench_of(rollout: float = 1.0, train: float = 2.0, images: float = 16.0) -> Bench:
    """A bench whose iteration is its two phases and 0.5 s of the driver, a quarter more or less of all."""
    middle = {
        "perf/rollout_time": rollout,
        "perf/train_time": train,
        "perf/unaccounted_time": 0.5,
        "perf/step_time": rollout + train + 0.5,
        "perf/train_tflops": 344.0,
    }
    return Bench(
        name="made",
        host=HOST,
        iterations=3,
        start_seconds=9.0,
        first={"perf/step_time": 60.0},
        middle=middle,
        peaks={"rollout": 12.0, "train": 30.0},
        work={"rollout": images},
        ranges=ranges(
            [{k: share * v for k, v in times_of(middle).items()} for share in (0.75, 1.25)]
        ),
    )


def test_a_bench_shows_phases_rates_and_where_the_rates_are_kept(
    recipe: Path, tmp_path: Path, drl: Drl
) -> None:
    file = tmp_path / "figures.json"
    code, out, err = drl("bench", str(recipe), "--iterations", "3", "--json", str(file))
    assert code == 0, err
    for word in ("rollout", "train", "update_weights", "unaccounted", "images/s", "pairs/s"):
        assert word in out
    assert "no published peak for CPU" in out
    assert "medians of 2" in out
    assert f"rates    {tmp_path / 'rates.json'}" in out
    found = json.loads(file.read_text())
    assert found["work"] == {"rollout": 8.0, "train": 16.0}
    assert found["speed"]["perf/rollout_filler_rows"] == 0.0
    assert found["step_seconds"] > 0
    assert found["first"]["step_seconds"] > 0
    assert sum(found["seconds"].values()) == pytest.approx(found["step_seconds"], rel=0.3)


def test_a_bench_leaves_its_run_only_where_it_is_asked_to(
    recipe: Path, tmp_path: Path, drl: Drl
) -> None:
    before = {path.name for path in tmp_path.iterdir()}
    run_dir = tmp_path / "kept"
    arguments = ("--iterations", "2", "--no-record", "--run-dir", str(run_dir))
    code, _, err = drl("bench", str(recipe), *arguments)
    assert code == 0, err
    assert {path.name for path in tmp_path.iterdir()} - before == {"kept"}
    rows = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == [0, 1]
    assert not any(name.startswith("eval/") for row in rows for name in row)
    for absent in ("checkpoints", "samples", "adapter", "report.html"):
        assert not (run_dir / absent).exists(), absent
    kept = load_recipe(run_dir / "recipe.toml", catalog=Catalog.load())
    assert kept.rollout.batch_size == 2


def test_a_bench_of_what_it_recorded_is_compared_with_the_plan(recipe: Path, drl: Drl) -> None:
    code, first, err = drl("bench", str(recipe), "--iterations", "2", "--compare")
    assert code == 0, err
    assert "no rates of this machine were known before" in first
    code, second, err = drl("bench", str(recipe), "--iterations", "2", "--compare")
    assert code == 0, err
    lines = [line for line in second.splitlines() if ", seconds" in line]
    assert [line.split(",")[0] for line in lines][:2] == ["rollout", "train"]
    assert all(line.endswith("%") for line in lines)


def test_cost_is_shown_value_by_value(recipe: Path, tmp_path: Path, drl: Drl) -> None:
    file = tmp_path / "growth.json"
    arguments = ("--iterations", "2", "--no-record", "--json", str(file))
    vary = ("--vary", "rollout.batch_size=1,2,3", "--compare")
    code, out, err = drl("bench", str(recipe), *arguments, *vary)
    assert code == 0, err
    found = json.loads(file.read_text())
    assert [row["value"] for row in found] == ["1", "2", "3"]
    assert [row["work"] for row in found] == [
        {"rollout": 4.0 * count, "train": 8.0 * count} for count in (1, 2, 3)
    ]
    assert all(set(row["off"]) == {"rollout", "train"} for row in found)
    heads = [line.split()[0] for line in out.splitlines() if line.startswith("rollout.batch_size")]
    each = [f"rollout.batch_size={n}" for n in (1, 2, 3)]
    assert heads == [*each, "rollout.batch_size", "rollout.batch_size", *each]
    assert "…" not in out, "a column is cut short"
    assert all(set(row["predicted"]["peak_bytes"]) >= {"rollout", "train"} for row in found)
    assert "images" in out
    assert "pairs" in out


def test_a_value_that_fails_costs_none_of_those_before_it(
    recipe: Path, tmp_path: Path, drl: Drl
) -> None:
    """CUDA graphs on a CPU: refused when the engine starts, after the first value was measured."""
    file = tmp_path / "growth.json"
    arguments = ("--iterations", "2", "--no-record", "--json", str(file))
    vary = ("--vary", "rollout.local.cuda_graphs=false,true")
    code, out, err = drl("bench", str(recipe), *arguments, *vary)
    assert code == 2
    said, error = err.splitlines()[-2:]
    assert said == ("rollout.local.cuda_graphs=true was not finished; what was measured before it:")
    assert "rollout.local.cuda_graphs is true, but the engine runs on cpu" in error
    (row,) = json.loads(file.read_text())
    assert row["value"] == "false"
    assert row["seconds"]["rollout"] > 0
    assert "false" in out.split("rollout.local.cuda_graphs=true")[1], "the table of the one value"


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--vary", "rollout.batch_size"), "at least two values"),
        (("--vary", "rollout.batch_size=2"), "at least two values"),
        (("--vary", "rollout.batch_sise=2,3"), "rollout.batch_sise"),
        (("--set", "rollout.batch_size=0"), "rollout.batch_size"),
        (("--iterations", "1"), "--iterations"),
        (("--memory", "24GiB"), "runs on the CPU"),
        (("--memory", "much"), "no size"),
    ],
)
def test_bad_input_is_refused_before_anything_runs(
    recipe: Path, drl: Drl, arguments: tuple[str, ...], said: str
) -> None:
    code, out, err = drl("bench", str(recipe), *arguments)
    assert code == 2
    assert said in err
    assert "iteration 1" not in out


def test_a_file_of_figures_is_never_written_over(recipe: Path, tmp_path: Path, drl: Drl) -> None:
    file = tmp_path / "old.json"
    file.write_text("mine")
    code, _, err = drl("bench", str(recipe), "--json", str(file))
    assert code == 2
    assert "name a new file" in err
    assert file.read_text() == "mine"


def test_the_recipes_own_rewards_are_used_where_asked_for(recipe: Path) -> None:
    catalog = Catalog.load()
    own = bench_recipe(Wanted(recipe=recipe, rewards="recipe"), catalog)
    assert own.reward.type == "jpeg"
    free = bench_recipe(Wanted(recipe=recipe), catalog)
    assert (free.reward.type, free.reward.custom) == (None, "drl.bench.rewards:synthetic")
    assert free.sampling == own.sampling
    assert free.optimizer == own.optimizer


def test_a_bench_neither_dumps_nor_evaluates_nor_saves(recipe: Path) -> None:
    dump = 'debug.save_rollout_data="dump_{rollout_id}.safetensors"'
    sets = (dump, "checkpoint.save_interval=1", "train.start_rollout_id=1")
    found = bench_recipe(Wanted(recipe=recipe, sets=sets, iterations=3), Catalog.load())
    assert found.debug.save_rollout_data is None
    assert found.checkpoint.save_interval is None
    assert found.eval.datasets == ()
    assert found.train.num_rollout == 5  # a last one, which would save, is never reached


def test_synthetic_rewards_differ_within_a_group_and_repeat() -> None:
    samples = [make_sample(seed=100 + member, member=member) for member in range(8)]
    run: Any = None
    values = asyncio.run(synthetic(run, samples))
    assert len(set(values)) == 8
    assert all(0 <= value < 1 for value in values)
    assert values == asyncio.run(synthetic(run, samples))


SUPERVISED = """
[model]
checkpoint = "{checkpoint}"

[lora]
enabled = true
rank = 4

[data]
source = "glyphs"

[data.glyphs]
count = 4

[sampling]
width = 48
height = 16

[rollout]
batch_size = 2

[algorithm]
loss = "sft_loss"

[train]
num_rollout = 9
train_only = true

[optimizer]
lr = 1e-3
"""


def test_a_supervised_recipe_has_no_rewards_to_replace_and_no_images_to_count(
    tmp_path: Path, checkpoint: Path
) -> None:
    wanted = Wanted(recipe=write_recipe(tmp_path, checkpoint, SUPERVISED), iterations=2)
    catalog = Catalog.load()
    loaded = bench_recipe(wanted, catalog)
    assert loaded.reward.custom is None
    lines: list[str] = []
    found = measure(loaded, wanted, catalog, lines.append)
    assert found.work == {"train": 2.0}
    assert "perf/images_per_second" not in found.middle
    assert found.middle["perf/train_tflops"] > 0
    assert lines[-1].startswith("iteration 2/2: ")


def test_phases_are_listed_by_time_with_their_share_and_peak() -> None:
    assert phase_rows(bench_of()) == [
        ("train", "2.000 s", "1.500 – 2.500", "57.1 %", "30.00"),
        ("rollout", "1.000 s", "0.750 – 1.250", "28.6 %", "12.00"),
        ("unaccounted", "0.500 s", "0.375 – 0.625", "14.3 %", "–"),
        ("iteration", "3.500 s", "2.625 – 4.375", "", ""),
    ]
    assert memory_title(bench_of()) == "peak GiB"


def test_an_unknown_peak_is_said_and_unknown_work_too() -> None:
    assert ("TFLOP/s of training", "344") in speed_rows(bench_of())
    assert speed_rows(bench_of())[-1] == ("MFU", "– (no published peak for NVIDIA H200)")
    bare = bench_of()
    middle = {name: value for name, value in bare.middle.items() if "tflops" not in name}
    unknown = Bench(
        name="made", host=HOST, iterations=1, start_seconds=0.0, first=middle, middle=middle
    )
    assert speed_rows(unknown) == [("TFLOP/s", "– (the model family does not count its work)")]
    partly = replace(unknown, middle={**middle, "perf/rollout_tflops": 400.0})
    assert ("TFLOP/s of training", "– (the model family does not count such a backward pass)") in (
        speed_rows(partly)
    )


def test_a_prediction_stands_beside_the_measurement_with_its_error() -> None:
    rows = compared_rows(bench_of(), {"rollout": 1.1, "absent": 3.0}, {"train": 33 * 2**30})
    assert rows == [
        ("rollout, seconds", "1.1", "1", "+10.0 %"),
        ("train, peak GiB", "33", "30", "+10.0 %"),
    ]
    assert compared_rows(bench_of(), None, {}) == []


def grown(*seconds: float) -> list[Growth]:
    """Growth of rollouts of 16, 64, 256 images that took these seconds."""
    values = ("2", "8", "32")[: len(seconds)]
    made = [
        bench_of(rollout=spent, images=images)
        for spent, images in zip(seconds, (16.0, 64.0, 256.0), strict=False)
    ]
    return growths(Varied(key="rollout.batch_size", values=values), made)


def test_cost_that_grows_on_a_line_with_a_fixed_part_is_not_off_it() -> None:
    found = grown(0.5 + 1.6, 0.5 + 6.4, 0.5 + 25.6)
    assert [growth.off["rollout"] for growth in found] == pytest.approx([0.0] * 3, abs=1e-9)
    assert growth_rows(found, "rollout")[0] == (
        "2",
        "16",
        "2.100 s",
        "1.575 – 2.625",
        "131.2 ms",
        "+0.0 %",
        "12.00",
    )
    assert growth_rows(found, "train") == []


def test_cost_that_grows_faster_than_its_work_is_off_the_line() -> None:
    found = grown(1.0, 16.0, 256.0)  # with the square of the work
    off = [growth.off["rollout"] for growth in found]
    assert max(map(abs, off)) > 0.5


def test_two_values_always_lie_on_a_line_so_nothing_is_said() -> None:
    found = grown(1.0, 5.0)
    assert [growth.off for growth in found] == [{}, {}]
    assert growth_rows(found, "rollout")[0][5] == "–"


@pytest.mark.parametrize(
    ("text", "values"),
    [
        ("rollout.batch_size=2,8,32", ("2", "8", "32")),
        ("sde.sde_window.range=[0, 3],[0, 6]", ("[0, 3]", "[0, 6]")),
        ('run.name="a,b",c', ('"a,b"', "c")),
        ("train.compile = true, false", ("true", "false")),
    ],
)
def test_values_are_parted_by_the_commas_that_lie_between_them(
    text: str, values: tuple[str, ...]
) -> None:
    assert varied(text).values == values


@pytest.mark.parametrize("text", ["", "=1,2", "a", "a=", "a=1", "a=1,,2"])
def test_a_variation_needs_an_option_and_values(text: str) -> None:
    with pytest.raises(BadInput, match="at least two values"):
        varied(text)


def test_a_run_has_the_figures_in_its_log_and_the_pictures_in_its_report(
    recipe: Path, tmp_path: Path
) -> None:
    run_here(recipe, tmp_path / "run", "train.num_rollout=3", "eval.datasets=[]")
    rows = [json.loads(line) for line in (tmp_path / "run/metrics.jsonl").read_text().splitlines()]
    for row in rows:
        assert row["perf/images_per_second"] * row["perf/rollout_time"] == pytest.approx(8)
        assert row["perf/pairs_per_second"] * row["perf/train_time"] == pytest.approx(16)
        assert row["perf/rollout_tflops"] > 0
        assert 0 < row["perf/driver_share"] < 1
        assert row["perf/memory/train_gib"] > 0.1
        assert not any(name.endswith("_mfu") for name in row)
    timelines = (tmp_path / "run/timeline.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in timelines] == [0, 1, 2]
    report = (tmp_path / "run/report.html").read_text()
    for word in ("The last iterations, phase by phase", "reward (beside)", "Memory by phase"):
        assert word in report

"""Benches of recipes that are out of the ordinary, and of those that fail."""

from __future__ import annotations

import json
import os
import signal
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest
from e2e import metric_rows, run_here, write_recipe

from drl.bench.measure import Bench, Rows, Wanted, bench_recipe, measure
from drl.catalog import Catalog
from drl.observe.directory import RunDirectory

Drl = Callable[..., tuple[int, str, str]]


@pytest.fixture
def recipe(tmp_path: Path, checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The tiny recipe; temporary folders of this process lie in ``tmp_path / "temp"``."""
    (tmp_path / "temp").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "temp"))
    monkeypatch.setenv("DRL_RATES", str(tmp_path / "rates.json"))
    return write_recipe(tmp_path, checkpoint)


def bench(recipe: Path, *sets: str, rewards: str = "synthetic") -> Bench:
    catalog = Catalog.load()
    wanted = Wanted(recipe=recipe, sets=sets, iterations=2, rewards=rewards)
    return measure(bench_recipe(wanted, catalog), wanted, catalog, lambda line: None)


def test_a_recipe_that_only_rolls_out_has_no_training_to_time(recipe: Path) -> None:
    found = bench(recipe, "debug.rollout_only=true")
    assert "train" not in found.seconds
    assert found.work == {"rollout": 8.0}
    assert found.middle["perf/images_per_second"] > 0


def test_without_optimizer_steps_training_is_its_forwards(recipe: Path) -> None:
    whole = bench(recipe)
    forwards = bench(recipe, "debug.skip_optimizer_step=true")

    def work(found: Bench) -> float:
        return found.middle["perf/train_tflops"] * found.seconds["train"]

    assert work(forwards) < 0.6 * work(whole)
    assert forwards.work["train"] == 16.0


def test_a_filter_of_groups_without_spread_lets_synthetic_rewards_through(recipe: Path) -> None:
    found = bench(recipe, 'rollout.dynamic_sampling_filter="zero_std"')
    assert found.work["rollout"] == 8.0
    assert found.middle["rollout/informative_groups"] == 1.0


def test_several_reward_terms_become_one_that_costs_nothing(recipe: Path) -> None:
    text = recipe.read_text().replace(
        'type = "jpeg"',
        'terms = [{ name = "small", plugin = "jpeg" }, { name = "large", plugin = "jpeg" }]\n'
        "[reward.large]\ncompress = false",
    )
    recipe.write_text(text)
    found = bench(recipe)
    assert "rollout/reward/custom_mean" in found.middle
    own = bench(recipe, rewards="recipe")
    assert {"rollout/reward/small_mean", "rollout/reward/large_mean"} <= own.middle.keys()


def test_the_temporary_run_is_gone_after_a_bench(recipe: Path, tmp_path: Path) -> None:
    bench(recipe)
    assert [path.name for path in (tmp_path / "temp").glob("drl-bench-*")] == []


def test_a_run_that_fails_fails_the_bench_with_its_own_message_and_leaves_nothing(
    recipe: Path, tmp_path: Path, drl: Drl
) -> None:
    rows = recipe.parent / "prompts.jsonl"
    rows.write_text("")
    code, out, err = drl("bench", str(recipe), "--no-record")
    assert code == 2
    assert "prompts.jsonl" in err
    assert "medians" not in out
    assert [path.name for path in (tmp_path / "temp").glob("drl-bench-*")] == []


def test_a_folder_with_something_in_it_is_not_benched_into(
    recipe: Path, tmp_path: Path, drl: Drl
) -> None:
    taken = tmp_path / "taken"
    taken.mkdir()
    (taken / "mine.txt").write_text("mine")
    code, _, err = drl("bench", str(recipe), "--no-record", "--run-dir", str(taken))
    assert code == 2
    assert "is not empty" in err
    assert [path.name for path in taken.iterdir()] == ["mine.txt"]


def test_the_folders_of_all_values_are_looked_at_before_the_first_is_benched(
    recipe: Path, tmp_path: Path, drl: Drl
) -> None:
    taken = tmp_path / "runs" / "1"
    taken.mkdir(parents=True)
    (taken / "mine.txt").write_text("mine")
    arguments = ("--no-record", "--run-dir", str(tmp_path / "runs"))
    code, out, err = drl("bench", str(recipe), *arguments, "--vary", "train.micro_batch_size=2,8")
    assert (code, out) == (2, "")
    assert f"--run-dir: {taken} is not empty; name a new folder" in err
    assert "--resume" not in err
    assert [path.name for path in (tmp_path / "runs").iterdir()] == ["1"]


def test_each_value_of_a_varied_option_has_a_folder_of_its_own(
    recipe: Path, tmp_path: Path, drl: Drl
) -> None:
    arguments = ("--iterations", "2", "--no-record", "--run-dir", str(tmp_path / "runs"))
    vary = ("--vary", "train.micro_batch_size=2,8")
    code, out, err = drl("bench", str(recipe), *arguments, *vary)
    assert code == 0, err
    assert "needs at least three values that change the amount of work" in out
    sizes = [
        (tmp_path / "runs" / name / "recipe.toml").read_text().splitlines() for name in ("0", "1")
    ]
    assert "micro_batch_size = 2" in sizes[0]
    assert "micro_batch_size = 8" in sizes[1]


def test_rates_are_kept_for_the_planner_and_only_when_wanted(
    recipe: Path, tmp_path: Path, drl: Drl
) -> None:
    code, _, err = drl("bench", str(recipe), "--iterations", "2", "--no-record")
    assert code == 0, err
    assert not (tmp_path / "rates.json").exists()
    code, _, err = drl("bench", str(recipe), "--iterations", "2")
    assert code == 0, err
    (card,) = json.loads((tmp_path / "rates.json").read_text())["cards"]
    assert (card["device"], card["dtype"], card["compiled"]) == ("CPU", "fp32", False)
    kinds = {one["kind"] for one in card["observations"]}
    assert {"forward", "training", "sync", "driver"} <= kinds
    assert {one["source"] for one in card["observations"]} == {"drl bench tiny"}


def test_a_bench_starts_from_the_checkpoint_that_the_recipe_loads(
    recipe: Path, tmp_path: Path
) -> None:
    run_here(recipe, tmp_path / "before", "train.num_rollout=1", "eval.datasets=[]")
    catalog, lines = Catalog.load(), list[str]()
    load = f'checkpoint.load="{tmp_path / "before"}"'
    wanted = Wanted(recipe=recipe, sets=(load,), iterations=2, run_dir=tmp_path / "kept")
    found = measure(bench_recipe(wanted, catalog), wanted, catalog, lines.append)
    assert any("after iteration 1" in line for line in lines)
    assert "  2 iterations on cpu in fp32" in lines
    assert [row["step"] for row in metric_rows(tmp_path / "kept")] == [1, 2]
    assert found.middle["train/step"] == 2.0


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_bench_that_is_stopped_saves_nothing_and_takes_its_folder_along(
    recipe: Path, tmp_path: Path, drl: Drl, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    """There is nothing to go on from: one Ctrl-C is enough, and no folder is named that goes at once."""
    held: list[Path] = []
    take = Rows.metrics

    def metrics(self: Rows, step: int, values: Mapping[str, float]) -> None:
        take(self, step, values)
        held.extend((tmp_path / "temp").iterdir())
        os.kill(os.getpid(), number)

    monkeypatch.setattr(Rows, "metrics", metrics)
    before = [signal.getsignal(one) for one in (signal.SIGINT, signal.SIGTERM)]
    code, out, err = drl("bench", str(recipe), "--iterations", "5", "--no-record")
    assert (code, err.strip()) == (130, "interrupted")
    assert "iteration 1/5" in out
    assert "saved" not in out
    assert "--resume" not in out
    assert len(held) == 1
    assert not [*(tmp_path / "temp").iterdir()]
    assert [signal.getsignal(one) for one in (signal.SIGINT, signal.SIGTERM)] == before


def test_folders_of_killed_benches_go_with_the_next_and_those_in_use_stay(
    recipe: Path, tmp_path: Path
) -> None:
    killed, used, other = (tmp_path / "temp" / f"drl-bench-{name}" for name in "abc")
    for folder in (killed, used, other):
        (folder / "run").mkdir(parents=True)
    for file in ("lock", "lock.json", "recipe.toml"):
        (killed / "run" / file).write_text("{}")  # as SIGKILL leaves it
    (other / "run" / "recipe.toml").write_text("")  # whatever that is: it names no holder
    with RunDirectory.create_at(used / "run"):
        bench(recipe)
        assert {path.name for path in (tmp_path / "temp").iterdir()} == {used.name, other.name}


def test_what_cannot_run_is_told_once(recipe: Path, drl: Drl) -> None:
    setting = "train.attention_backend=flashy"
    code, _, err = drl("bench", str(recipe), "--iterations", "2", "--set", setting)
    assert code == 2
    assert err.count("no attention backend 'flashy'") == 1
    assert "not planned" not in err


def test_what_would_be_refused_at_the_end_is_refused_at_the_start(
    recipe: Path, tmp_path: Path, drl: Drl
) -> None:
    """A folder for the figures that is not there, a last value of several that is none."""
    code, out, err = drl("bench", str(recipe), "--json", str(tmp_path / "none" / "figures.json"))
    assert (code, out) == (2, "")
    assert "there is no folder" in err
    code, out, err = drl("bench", str(recipe), "--vary", "rollout.local.rows=2,x")
    assert (code, out) == (2, "")
    assert "rollout.local.rows  must be a whole number, got 'x'" in err

"""What ``drl plan`` prints of a prediction of round numbers."""

from __future__ import annotations

import io
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from rich.table import Table
from small_plan import CARD, prediction

from drl.errors import BadInput
from drl.plan.advice import Advice
from drl.plan.rates import FORWARD, TRAINING, Observation, RateKey, record_rates
from drl.stages.pairs import BatchPlan
from drl_cli.plan import read_size
from drl_cli.plan_tables import (
    advice_lines,
    as_plain,
    gib,
    memory_table,
    remarks,
    show,
    tflop,
    work_table,
)

GIB = 2**30
PLAN = BatchPlan(
    prompts=2,
    samples_per_prompt=8,
    optimizer_steps=1,
    samples_per_step=16,
    pairs_per_sample=2,
    micro_batch_size=8,
)


@pytest.fixture(autouse=True)
def rates(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DRL_RATES", str(tmp_path / "rates.json"))


@pytest.fixture
def measured() -> None:
    key = RateKey(device="Card", torch="2.9.0", dtype="bf16", compiled=False)
    values = {FORWARD: 0.1, TRAINING: 0.2}
    record_rates(key, [Observation(kind=k, work=1e12, value=v) for k, v in values.items()])


def printed(table: Table) -> list[list[str]]:
    text = io.StringIO()
    Console(file=text, width=100).print(table)
    rows = [line for line in text.getvalue().splitlines() if line.startswith("│")]
    return [[cell.strip() for cell in row.strip("│").split("│")] for row in rows]


def on(memory: int | None, **changes: Any) -> Any:
    return replace(prediction(**changes), card=replace(CARD, memory=memory))


@pytest.mark.parametrize(
    ("count", "text"),
    [(0, "0.00"), (GIB, "1.00"), (9.994 * GIB, "9.99"), (10 * GIB, "10.0"), (139.8 * GIB, "139.8")],
)
def test_sizes_have_three_digits(count: float, text: str) -> None:
    assert gib(count) == text


@pytest.mark.parametrize(
    ("count", "text"), [(2.5e9, "0.0025"), (1.234e13, "12.3"), (1234.56e12, "1,234.6")]
)
def test_work_has_three_digits(count: float, text: str) -> None:
    assert tflop(count) == text


@pytest.mark.parametrize(
    ("text", "count"),
    [
        ("24GiB", 24 * GIB),
        ("24 gib", 24 * GIB),
        ("80GB", 80 * 10**9),
        ("1.5GiB", 3 * GIB // 2),
        ("512MiB", 2**29),
        ("7 MB", 7_000_000),
    ],
)
def test_sizes_are_read(text: str, count: int) -> None:
    assert read_size(text) == count


@pytest.mark.parametrize("text", ["", "24", "GiB", "1.2.3GiB", "24 GiBs", "-3GB", "0GiB", "²GiB"])
def test_other_texts_are_no_sizes(text: str) -> None:
    with pytest.raises(BadInput, match="--memory"):
        read_size(text)


def test_the_memory_table_adds_up() -> None:
    found = prediction()
    rows = printed(memory_table(found))
    assert [row[0] for row in rows] == ["rollout", "train", "update_weights"]
    assert [row[1] for row in rows] == ["decoding", "backward", "push"]
    for phase in found.phases:
        total = phase.weights + phase.state + phase.data + phase.activations + phase.workspace
        assert phase.peak == total


def test_memory_of_graphs_has_a_column_where_there_is_any() -> None:
    found = prediction(graphs=True)
    rows = printed(memory_table(found))
    assert [row[-1] for row in rows] == [gib(phase.graphs) for phase in found.phases]
    assert len(rows[0]) == len(printed(memory_table(prediction()))[0]) + 1


def test_without_rates_the_work_table_has_no_seconds() -> None:
    rows = printed(work_table(prediction(checkpointed=1.0, extra_passes=1)))
    assert [row[0] for row in rows] == ["rollout", "train", "recomputed", "without gradient"]
    assert [row[1] for row in rows] == ["80", "128.0", "32", "32"]
    assert {row[3] for row in rows} == {""}


@pytest.mark.usefixtures("measured")
def test_shares_of_an_iteration() -> None:
    rows = printed(work_table(prediction()))
    assert [(row[0], row[3], row[4]) for row in rows] == [
        ("rollout", "8.00", "38%"),
        ("train", "12.80", "62%"),
        ("iteration", "20.80", ""),
    ]


@pytest.mark.usefixtures("measured")
def test_speeds_name_the_rates_they_come_from() -> None:
    first = next(iter(remarks(on(None))))
    assert first == "2.0 images/s, 2.5 pairs/s; rates measured on Card (torch 2.9.0)"


def test_a_card_without_rates_or_memory_is_told_what_to_do() -> None:
    lines = list(remarks(on(None)))
    assert lines[0].startswith("no measured rates for Card in bf16: run  drl bench RECIPE")
    assert "--memory 24GiB" in lines[1]


@pytest.mark.usefixtures("measured")
def test_a_recipe_that_fits_hears_what_is_faster() -> None:
    lines = list(remarks(on(GIB, checkpointed=1.0)))
    assert lines[1].startswith("fits: train needs 0.00 GiB, 0.95 of the card's 1.00 GiB")
    assert lines[2] == "faster, and fits as well:"
    assert lines[3].startswith("  model.gradient_checkpointing = false: 0.00 GiB, 20.80 s")


def test_a_recipe_that_does_not_fit_hears_what_to_change() -> None:
    lines = list(remarks(on(100)))
    assert lines[1].startswith("does not fit: ")
    assert any("(does not fit alone)" in line for line in lines)
    assert any(line.startswith("  all of these: ") for line in lines)
    assert lines[-1].startswith("    ")


def test_moves_of_offload_are_named_where_seconds_are() -> None:
    one = Advice(settings=("cluster.offload_train = true",), room=GIB, fits=True, seconds=2.0)
    assert list(advice_lines(one))[1:] == ["    plus the moves between CPU and GPU"]


def test_what_no_setting_changes_is_said() -> None:
    bare = replace(on(1, rollout=False, rows=1, checkpointed=1.0, adapters=False), rank=None)
    assert list(remarks(bare))[-1] == "no setting that drl knows makes it fit"


def test_what_is_left_out_is_said() -> None:
    lines = list(remarks(on(None, omitted=("encoding of data", "rewards"), uncounted=("a", "b"))))
    assert "work and seconds are without encoding of data, without rewards" in lines
    assert "not counted: a, b" in lines


def test_one_change_is_one_line_and_several_are_a_list() -> None:
    one = Advice(settings=("a = 1",), room=GIB, fits=True, seconds=2.0)
    assert list(advice_lines(one)) == ["  a = 1: 1.00 GiB, 2.00 s an iteration"]
    both = Advice(settings=("a = 1", "b = 2"), room=GIB, fits=False, seconds=None)
    assert list(advice_lines(both)) == [
        "  all of these: 1.00 GiB (does not fit)",
        "    a = 1",
        "    b = 2",
    ]


def test_json_has_every_figure_in_plain_units() -> None:
    plan = json.loads(as_plain(PLAN, (1, 4), on(100)))
    assert plan["batch"]["images_per_update"] == 16
    assert [one["ranks"] for one in plan["gpus"]] == [1, 4]
    assert {one["images_per_update"] for one in plan["gpus"]} == {16}
    assert plan["work"]["total"] == 144e12
    assert plan["fits"] is False
    assert plan["advice"][0]["settings"]
    assert plan["seconds"] is plan["iteration"] is None
    assert plan["rates"] == {"engine": None, "trainer": None}
    assert plan["budget"] == 95
    assert [one["room"] for one in plan["phases"]] == list(prediction().rooms.values())
    assert plan["faster"] == []


@pytest.mark.usefixtures("measured")
def test_json_has_what_would_be_faster_and_whose_rates_count() -> None:
    plan = json.loads(as_plain(PLAN, (), on(GIB, checkpointed=1.0, omitted=("rewards",))))
    assert plan["faster"][0]["settings"] == ["model.gradient_checkpointing = false"]
    assert plan["iteration"] == pytest.approx(sum(plan["seconds"].values()))
    assert plan["rates"] == {"engine": "2.9.0", "trainer": "2.9.0"}
    assert (plan["without"], plan["not_counted"]) == (["rewards"], [])


def test_json_without_a_prediction_has_the_reason() -> None:
    plan = json.loads(as_plain(PLAN, (), "no configs"))
    assert plan == {"batch": plan["batch"], "reason": "no configs"}


def test_a_reason_is_said_on_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    show("no configs")
    assert capsys.readouterr().out == "memory and work are not predicted: no configs\n"
    assert CARD.memory is None

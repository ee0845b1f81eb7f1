"""What ``drl plan`` refuses as the run would, and what it says that it leaves out."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from e2e import write_recipe

from drl.catalog import Catalog
from drl.config import load_recipe
from drl.errors import BadInput
from drl.plan.predict import Card, predict
from drl.plan.scenario import Scenario

Drl = Callable[..., tuple[int, str, str]]
CATALOG = Catalog.load()


@pytest.fixture(autouse=True)
def rates(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DRL_RATES", str(tmp_path / "rates.json"))


@pytest.fixture
def tiny(tmp_path: Path, checkpoint: Path) -> Path:
    return write_recipe(tmp_path / "tiny", checkpoint)


def planned(recipe: Path, *sets: str) -> Scenario:
    loaded = load_recipe(recipe, sets=sets, catalog=CATALOG)
    return predict(loaded, CATALOG, Card(name="Card")).scenario


def test_a_plan_for_the_cpu_is_one(drl: Drl, tiny: Path) -> None:
    sets = ("--set", "sampling.guidance_scale=4.5", "--json")
    here, there = (
        json.loads(drl("plan", str(tiny), *words, *sets)[1])
        for words in (("--set", "cluster.device=cpu"), ("--device-name", "CPU"))
    )
    assert here == there
    assert there["card"] == {**here["card"], "name": "CPU", "memory": None}


@pytest.mark.parametrize(
    ("sets", "reason"),
    [
        (("lora.enabled=false",), "it has no adapters"),
        (("cluster.actor_num_gpus_per_node=2", "train.shard_frozen=always"), "are sharded"),
        (("cluster.actor_num_gpus_per_node=2", "train.cpu_offload=true"), "are sharded"),
    ],
)
def test_weights_that_are_never_shared_are_refused_as_by_the_run(
    tiny: Path, sets: tuple[str, ...], reason: str
) -> None:
    wanted = ("rollout.local.weights=shared", "cluster.device=cuda", *sets)
    with pytest.raises(BadInput, match=f"has no weights to share: .*{reason}"):
        planned(tiny, *wanted)


def test_what_several_ranks_add_is_not_hidden(tiny: Path) -> None:
    def uncounted(*sets: str) -> tuple[str, ...]:
        return planned(tiny, "cluster.device=cuda", *sets).uncounted

    ranks = "cluster.actor_num_gpus_per_node=2"
    assert uncounted() == ()
    assert uncounted(ranks)[1].startswith("frozen weights that are spread over ranks")
    assert len(uncounted(ranks, "train.shard_frozen=never")) == 1
    assert "gathers" in uncounted(ranks, "lora.enabled=false")[1]
    away = planned(tiny, "cluster.device=cuda", ranks, "train.cpu_offload=true")
    assert "moves of weights between CPU and GPU" in away.uncounted
    assert (away.cpu_offload, away.shareable) == (True, False)


def test_an_iteration_says_what_it_leaves_out(tiny: Path) -> None:
    offload = ("cluster.device=cuda", "cluster.offload_train=true")
    found = planned(tiny, *offload)
    assert found.omitted == ("rewards", "the moves between CPU and GPU")
    assert found.offload_given
    supervised = planned(tiny, "train.train_only=true", "algorithm.loss=sft_loss")
    assert supervised.omitted == ("encoding of data",)


def test_graphs_of_an_engine_on_the_cpu_are_refused_as_by_the_run(tiny: Path) -> None:
    with pytest.raises(
        BadInput, match=r"rollout.local.cuda_graphs is true, but the engine runs on cpu"
    ):
        planned(tiny, "cluster.device=cpu", "rollout.local.cuda_graphs=true")
    assert planned(tiny, "cluster.device=cuda", "rollout.local.cuda_graphs=true").graphs


def test_a_run_that_takes_no_step_is_not_planned_as_training(drl: Drl, tiny: Path) -> None:
    code, out, _ = drl("plan", str(tiny), "--set", "debug.skip_optimizer_step=true")
    assert code == 0
    assert "has no backward pass" in out
    assert "train" not in {line.split("│")[1].strip() for line in out.splitlines() if "│" in line}


@pytest.mark.parametrize(
    ("name", "device"), [("CPU", "cuda"), ("NVIDIA H200", "cpu"), ("", "cuda"), (" ", "cpu")]
)
def test_a_card_that_is_not_the_recipes_device_is_refused(
    drl: Drl, tiny: Path, name: str, device: str
) -> None:
    code, out, err = drl(
        "plan", str(tiny), f"--device-name={name}", "--set", f"cluster.device={device}"
    )
    assert (code, out) == (2, "")
    told = f"cluster.device = '{device}' name different devices" if name.strip() else "it is empty"
    assert told in err

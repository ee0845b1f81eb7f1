"""``drl align`` through the product: an engine with one fault at a time, and the cause that is named."""

from __future__ import annotations

import copy
import importlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from e2e import write_recipe
from third_party_plugins import installed

from drl.align.changes import causes_among
from drl.align.probe import Alignment, Wanted, measure, new_directory, probed_recipe, started
from drl.align.show import conclusion, findings_table, rows_table
from drl.catalog import Catalog
from drl.errors import TrustError
from drl.run import Run

SETS = (
    "rollout.engine=acme_faulty",
    "rollout.acme_faulty.rows=4",
    "sampling.guidance_scale=3.0",
)


class Lab:
    """A run whose engine is started once; every probe of it has another fault, and the same samples."""

    def __init__(self, run: Run, wanted: Wanted, faults: list[str]) -> None:
        self.run = run
        self.wanted = wanted
        self.faults = faults
        self.source = run.source

    def probe(self, fault: str = "") -> Alignment:
        self.faults[0] = fault
        self.run.source, self.run.counters.next_group = copy.deepcopy(self.source), 0
        try:
            return measure(self.run, self.wanted)
        finally:
            self.faults[0] = ""


def lab_of(folder: Path, checkpoint: Path, *sets: str, random: bool = False) -> Iterator[Lab]:
    recipe = write_recipe(folder, checkpoint)
    with installed(folder / "site", "acme-faulty"):
        catalog = Catalog.load()
        wanted = Wanted(recipe=recipe, sets=(*SETS, *sets), samples=4, random=random)
        loaded: Any = probed_recipe(wanted, catalog)
        with (
            new_directory(loaded, folder / "out") as directory,
            started(loaded, catalog, directory) as run,
        ):
            yield Lab(run, wanted, importlib.import_module("acme_faulty_engine").FAULT)


@pytest.fixture(scope="module")
def guided(tmp_path_factory: pytest.TempPathFactory, checkpoint: Path) -> Iterator[Lab]:
    """Guidance, and adapters that do nothing yet."""
    yield from lab_of(tmp_path_factory.mktemp("guided"), checkpoint)


def names(found: Alignment) -> list[str]:
    return [one.name for one in causes_among(found.findings)]


def test_without_a_fault_every_step_is_exactly_equal(guided: Lab) -> None:
    found = guided.probe()
    assert found.exact
    assert found.within
    assert {one.output_max for one in found.steps} == {0.0}
    assert list(found.findings) == []
    assert conclusion(found).startswith("exactly 0.0 at every step")
    assert [one.rows for one in found.rows] == [1, 2, 4, 8, 16]


@pytest.mark.parametrize(
    ("fault", "cause"),
    [
        ("stored in bf16", "latents from the engine's means and noises"),
        ("sigmas in fp16", "the trainer's own sigma table"),
        ("other formula", "guidance from the positive prediction"),
        *(
            pytest.param(fault, cause, marks=pytest.mark.slow)
            for fault, cause in {
                "time from sigma": "model time from sigma",
                "rounded conditions": "conditions rounded to bf16",
                "exchanged": "prompt and negative prompt exchanged",
                "no guidance": "no guidance",
                "dropped negative": "no guidance",
                "math attention": "attention kernel math",
            }.items()
        ),
    ],
)
def test_each_fault_is_named_and_nothing_else(guided: Lab, fault: str, cause: str) -> None:
    found = guided.probe(fault)
    assert found.max > 0
    assert cause in names(found)
    others = set(names(found)) - {cause}
    assert others <= EQUIVALENT.get(fault, set())
    removed = next(one for one in found.findings if one.name == cause)
    assert removed.verdict == "cause"
    assert removed.max <= found.max / 10


EQUIVALENT = {"time from sigma": {"the trainer's own sigma table"}}
"""Other changes that bring the same numbers about."""


def test_a_schedule_of_the_rollout_alone_is_named_with_both_tables(
    tmp_path: Path, checkpoint: Path
) -> None:
    for lab in lab_of(
        tmp_path, checkpoint
    ):  # an engine may keep its schedule: it has one from the start
        found = lab.probe("shift")
    (text,) = found.other_settings
    assert "different noise schedules (sampling.flow_shift" in text
    assert "rollout:" in text
    assert "training:" in text
    assert found.exact, "the trainer scores the steps by the schedule that the samples carry"


def test_a_fault_that_no_change_explains_is_said_to_be_unexplained(guided: Lab) -> None:
    found = guided.probe("unknown")
    assert names(found) == []
    assert "none of the changes" in next(findings_table(found.findings))


def test_an_engine_whose_log_probs_are_nan_is_stopped_at_the_sample(guided: Lab) -> None:
    with pytest.raises(TrustError, match=r"the engine's log-prob of step \d is nan"):
        guided.probe("nan")


@pytest.mark.slow
def test_an_engine_in_bf16_beside_a_trainer_in_fp32(guided: Lab) -> None:
    found = guided.probe("bf16 forward")
    assert found.max > 1e-5
    assert not found.within
    assert names(found)[0] == "forward in bf16"


@pytest.fixture(scope="module")
def merged(tmp_path_factory: pytest.TempPathFactory, checkpoint: Path) -> Iterator[Lab]:
    """Adapters that change the model."""
    sets = ("rollout.acme_faulty.weights=fp32", "sync.verify=off")
    yield from lab_of(tmp_path_factory.mktemp("merged"), checkpoint, *sets, random=True)


def test_merged_adapters_are_told_from_applied_ones(merged: Lab) -> None:
    found = merged.probe()
    assert 0 < found.max < 1e-7
    assert names(found) == ["adapters merged into the weights"]


def test_adapters_merged_in_bf16_are_told_from_a_right_merge(merged: Lab) -> None:
    found = merged.probe("merged in bf16")
    assert names(found) == ["adapters merged in bf16"]
    assert found.max > 1e-7, "ten times what a right merge rounds"


@pytest.mark.slow
def test_adapters_that_never_arrive_are_found(merged: Lab) -> None:
    found = merged.probe("adapters lost")
    assert names(found) == ["without adapters"]
    assert not found.within


def test_probing_leaves_the_trainers_weights_as_they_were(merged: Lab) -> None:
    models = merged.run.trainer.forward.models
    before = {k: p.detach().clone() for m in models.values() for k, p in m.named_parameters()}
    merged.probe()
    after = {k: p for m in models.values() for k, p in m.named_parameters()}
    assert all(p.equal(after[name]) for name, p in before.items())
    assert all(model.training for model in models.values())


@pytest.fixture(scope="module")
def dropping(tmp_path_factory: pytest.TempPathFactory, checkpoint: Path) -> Iterator[Lab]:
    """Adapters with dropout, in training mode alone."""
    sets = ("lora.dropout=0.5", "rollout.acme_faulty.weights=fp32", "sampling.guidance_scale=1.0")
    yield from lab_of(tmp_path_factory.mktemp("dropping"), checkpoint, *sets, random=True)


def test_dropout_is_named_and_guidance_is_not_tried_without_any(dropping: Lab) -> None:
    found = dropping.probe()
    assert names(found) == ["adapters merged into the weights", "evaluation mode (no dropout)"]
    assert found.max > 1e-5
    assert not any("guidance" in one.name or "prompt" in one.name for one in found.findings)


def test_rows_of_a_forward_are_compared_whatever_the_difference(dropping: Lab) -> None:
    text = "\n".join(rows_table(dropping.probe()))
    assert text.count("\n") >= 5
    assert "spread against the smallest" in text

"""A card that is full, as a message; what it says when there is no plan."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from small_plan import prediction

from drl.errors import DrlError, EngineError, OutOfMemory, RankError
from drl.plan import predict as predict_module
from drl.plan.shortage import KNOBS, best_changes, chain, is_shortage, one_of_each, shortage, told

FULL = (
    "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 24 GiB.\nMore."
)


def full() -> torch.OutOfMemoryError:
    return torch.OutOfMemoryError(FULL)


class Unplanned:
    """A recipe that no plan can be made of."""


def test_other_errors_are_left_alone() -> None:
    for error in (ValueError("x"), EngineError("CUDA trouble"), KeyboardInterrupt(), MemoryError()):
        assert shortage(error, None, None, "train") is None  # type: ignore[arg-type]


def test_it_is_found_behind_what_was_raised_from_it() -> None:
    try:
        try:
            raise full()
        except torch.OutOfMemoryError as error:
            raise EngineError("a batch failed") from error
    except EngineError as error:
        raised = error
    assert [type(one) for one in chain(raised)] == [EngineError, torch.OutOfMemoryError]
    found = shortage(raised, Unplanned(), None, "rollout")  # type: ignore[arg-type]
    assert isinstance(found, OutOfMemory)
    assert isinstance(found, DrlError | MemoryError)
    assert str(found).splitlines()[0] == (
        "out of memory in rollout: CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total "
        "capacity of 24 GiB."
    )


def test_another_ranks_words_are_understood() -> None:
    last = "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 1.00 GiB."
    words = f"rank 1 of 2 failed: Traceback (most recent call last):\n  File\n{last}"
    assert is_shortage(RankError(words))
    assert not is_shortage(RankError("rank 1 failed\n  ValueError: x"))
    found = shortage(RankError(words), Unplanned(), None, "train")  # type: ignore[arg-type]
    assert str(found).splitlines()[0] == f"out of memory in train: rank 1 of 2: {last}"


def test_an_error_without_words_still_has_a_name() -> None:
    found = shortage(torch.OutOfMemoryError(), Unplanned(), None, "eval")  # type: ignore[arg-type]
    assert str(found).splitlines()[0] == "out of memory in eval: OutOfMemoryError"


def test_a_run_that_has_not_begun_says_so() -> None:
    found = shortage(full(), Unplanned(), None, None)  # type: ignore[arg-type]
    assert str(found).startswith("out of memory in start: ")


@pytest.mark.parametrize(
    ("phase", "knob"), [("train", "train.micro_batch_size"), ("eval", "cluster.offload = true")]
)
def test_without_a_plan_there_are_general_knobs(phase: str, knob: str) -> None:
    lines = told(Unplanned(), None, phase)  # type: ignore[arg-type]
    assert lines[0] == "turn one of these:"
    assert len(lines) == 1 + KNOBS
    assert any(knob in line for line in lines)


def test_the_plan_and_the_three_best_changes_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    planned: Any = prediction(own_weights="fp32")
    monkeypatch.setattr(predict_module, "predict", lambda recipe, catalog: planned)
    lines = told(None, None, "train")  # type: ignore[arg-type]
    assert lines[0].startswith("the plan: rollout 0.0 GiB, train 0.0 GiB, update_weights")
    assert lines[1] == "turn one of these, with what train then needs:"
    assert len(lines) == 2 + KNOBS + 1
    assert lines[-1].startswith("drl plan RECIPE")


def test_changes_are_the_strongest_for_the_phase_in_order_of_cost() -> None:
    planned = prediction(own_weights="fp32")
    found = best_changes(planned, "train")
    assert len(found) == KNOBS
    every = [(text, peak) for text, _, peak in found]
    assert every == [
        (text, planned.instead(**fields).peak_bytes["train"])
        for text, fields in (
            ('rollout.weights = "shared"', {"own_weights": "shared"}),
            ('text = "released"', {"released": frozenset({"text_encoder"})}),
            ("cluster.offload = true", {"offload_train": True, "offload_rollout": True}),
        )
    ]


def test_what_graphs_keep_counts_and_can_be_given_up() -> None:
    planned = prediction(graphs=True, offload_train=True, offload_rollout=True)
    named = {text: room for text, _, room in best_changes(planned, "rollout")}
    without = planned.instead(graphs=False)
    assert named["rollout.graphs = false"] == without.rooms["rollout"] < planned.rooms["rollout"]
    (kept,) = [phase.graphs for phase in planned.phases if phase.name == "rollout"]
    copies = planned.rooms["rollout"] - kept - without.rooms["rollout"]
    assert copies == planned.peak_bytes["rollout"] - without.peak_bytes["rollout"] > 0


def test_a_phase_that_the_plan_does_not_know_is_taken_for_the_largest() -> None:
    planned = prediction()
    assert {name for _, name, _ in best_changes(planned, "eval")} == {planned.largest.name}


def test_an_option_is_named_once() -> None:
    first = one_of_each([(("a = 4",), {}), (("a = 2", "c = 1"), {}), (("b = 1",), {})])
    assert [settings for settings, _ in first] == [("a = 4",), ("b = 1",)]

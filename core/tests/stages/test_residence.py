"""Who is on the device in each phase: what is given back comes first, what is not needed stays away."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from drl.errors import SyncError
from drl.interfaces.engine import EngineCapabilities, Memory
from drl.lora import LoraConfig, inject
from drl.stages.residence import (
    Residence,
    for_sampling,
    for_sync,
    for_training,
    remarks,
    residence_of,
    shared_with_engine,
)


class Party:
    """Trainer and engines that write down what they are told; ``fails`` is a call that raises."""

    def __init__(self, *, shares: bool, payload: str = "lora") -> None:
        self.told: list[str] = []
        self.fails: str | None = None
        self.payload = payload
        able = EngineCapabilities(shares_weights=shares)
        self.engine = SimpleNamespace(capabilities=lambda: able)
        self.handles = lambda: (SimpleNamespace(capabilities=able),)

    def note(self, text: str) -> None:
        if text == self.fails:
            raise SyncError(text)
        self.told.append(text)

    def sleep(self, *, frozen: bool) -> None:
        self.note("sleep" if frozen else "sleep but for frozen weights")

    def wake(self) -> None:
        self.note("wake")

    def release(self, what: Memory) -> None:
        self.note(f"release {what}")

    def resume(self, what: Memory) -> None:
        self.note(f"resume {what}")


class Story:
    """A run of two parties; ``take`` gives what was told since it was last asked."""

    def __init__(
        self, *, train: bool, rollout: bool, shares: bool = False, engines: bool = True, **more: Any
    ) -> None:
        self.party = Party(shares=shares, **more)
        self.phases: list[str] = []
        self.events: list[str] = []
        self.run: Any = SimpleNamespace(
            residence=Residence(trainer_leaves=train, engine_leaves=rollout),
            engines=self.party if engines else None,
            trainer=self.party,
            phases=SimpleNamespace(phase=self._phase),
            event=self.events.append,
            components={},
            context=SimpleNamespace(device="cpu"),
        )

    @contextmanager
    def _phase(self, name: str) -> Iterator[None]:
        self.phases.append(name)
        yield

    def take(self) -> list[str]:
        told, self.party.told = self.party.told, []
        return told


def iteration(story: Story) -> list[list[str]]:
    """Return what each phase of an iteration tells the parties: sync, rollout, training, sync, evaluation."""
    steps = (for_sync, for_sampling, for_training, for_sync, for_sampling)
    told = []
    for step in steps:
        step(story.run)
        told.append(story.take())
    return told


def test_nobody_moves_unless_asked() -> None:
    story = Story(train=False, rollout=False)
    assert iteration(story) == [[], [], [], [], []]
    assert story.phases == story.events == []


def test_both_take_turns_and_meet_for_the_sync() -> None:
    story = Story(train=True, rollout=True)
    turns = [
        [],
        ["sleep"],
        ["release rest", "release weights", "wake"],
        ["resume weights"],
        ["sleep", "resume rest"],
    ]
    assert iteration(story) == turns
    assert set(story.phases) == {"offload"}
    assert iteration(story) == [["wake"], *turns[1:]]


def test_the_trainer_alone_leaves() -> None:
    story = Story(train=True, rollout=False)
    assert iteration(story) == [[], ["sleep"], ["wake"], [], ["sleep"]]


def test_the_engine_alone_leaves() -> None:
    story = Story(train=False, rollout=True)
    released = ["release rest", "release weights"]
    assert iteration(story) == [[], [], released, ["resume weights"], ["resume rest"]]


def test_frozen_weights_stay_where_an_engine_computes_with_them() -> None:
    story = Story(train=True, rollout=True, shares=True)
    story.run.context.device = "cuda"
    assert iteration(story)[1] == ["sleep but for frozen weights"]
    assert [line.partition(":")[0] for line in story.events] == [
        "cluster.offload_rollout",
        "cluster.offload_train",
    ]
    for_sync(story.run)
    assert len(story.events) == 2  # said once


def test_a_run_without_an_engine_has_nobody_to_make_room_for() -> None:
    story = Story(train=True, rollout=True, engines=False)
    for_sampling(story.run)
    for_training(story.run)
    assert story.take() == []


def test_what_fails_is_not_taken_for_done() -> None:
    story = Story(train=True, rollout=True)
    for_sampling(story.run)
    for fails in ("release weights", "wake"):
        story.party.fails = fails
        with pytest.raises(SyncError):
            for_training(story.run)
    story.party.fails = None
    for_training(story.run)
    assert story.take() == ["sleep", "release rest", "release weights", "wake"]


@pytest.mark.parametrize(
    ("both", "train", "rollout", "cpu", "expected"),
    [
        (False, None, None, False, (False, False)),
        (True, None, None, False, (True, True)),
        (True, False, None, False, (False, True)),
        (False, None, True, False, (False, True)),
        (True, None, False, True, (False, False)),
        (False, True, None, True, (False, False)),
    ],
)
def test_what_is_unset_is_as_offload_says(
    both: bool, train: bool | None, rollout: bool | None, cpu: bool, expected: tuple[bool, bool]
) -> None:
    cluster = SimpleNamespace(offload=both, offload_train=train, offload_rollout=rollout)
    recipe = SimpleNamespace(cluster=cluster, train=SimpleNamespace(cpu_offload=cpu))
    found = residence_of(recipe)
    assert (found.trainer_leaves, found.engine_leaves) == expected


def components(*, adapters: bool) -> dict[str, Any]:
    net = nn.Sequential(nn.Linear(3, 3))
    if adapters:
        config = LoraConfig(rank=1, alpha=1, target_modules=("0",))
        inject(net, config, generator=torch.Generator())
    return {"transformer": SimpleNamespace(module=net, lora="set" if adapters else None)}


def test_weights_are_shared_beside_adapters_that_are_pushed_as_they_are() -> None:
    story = Story(train=False, rollout=False, shares=True)
    story.run.components = components(adapters=True)
    shared = shared_with_engine(story.run)
    assert set(shared["transformer"]) == {"0.weight", "0.bias"}
    assert remarks(story.run) == []


@pytest.mark.parametrize(("device", "said"), [("cpu", 0), ("cuda", 2)])
def test_what_stays_on_a_gpu_is_said_where_anything_leaves_it(device: str, said: int) -> None:
    story = Story(train=True, rollout=True, shares=True)
    story.run.context.device = device
    assert len(remarks(story.run)) == said


def test_a_copy_that_could_have_been_shared_is_said_with_its_reason() -> None:
    story = Story(train=False, rollout=False, shares=True, payload="merged")
    story.run.components = components(adapters=True)
    assert shared_with_engine(story.run) == {}
    (line,) = remarks(story.run)
    assert "its own copy of transformer's weights: its adapters are merged by the trainer" in line
    story.run.context.device, story.party.payload = "cuda", "lora"
    assert shared_with_engine(story.run) == {}
    assert "0.weight is on cpu, the engine on cuda" in remarks(story.run)[0]


@pytest.mark.parametrize(("adapters", "shares"), [(False, True), (True, False)])
def test_a_copy_that_had_to_be_is_not_worth_a_word(adapters: bool, shares: bool) -> None:
    story = Story(train=False, rollout=False, shares=shares)
    story.run.components = components(adapters=adapters)
    assert shared_with_engine(story.run) == {}
    assert remarks(story.run) == []

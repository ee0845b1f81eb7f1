"""What a CUDA graph is recorded for, what it reads, and how many there are; no GPU is needed for that."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any
from weakref import ref

import pytest
import torch

from drl.api import Condition, Conditions, Guidance
from drl_engine_local.graphs import (
    GRAPHS,
    ForwardGraphs,
    Recording,
    arguments_of,
    copied,
    forms_of,
)


def condition(value: float, **values: Any) -> Condition:
    return Condition(arguments={"text": torch.full((2, 3), value), **values}, rows=2)


def test_a_graph_reads_memory_of_its_own() -> None:
    given = Conditions(positive=condition(1.0), negative=condition(2.0))
    own = copied(given)
    arguments_of(given)["positive.text"].zero_()
    texts = {name: tensor.tolist()[0][0] for name, tensor in arguments_of(own).items()}
    assert texts == {"positive.text": 1.0, "negative.text": 2.0}
    alone = copied(Conditions(positive=condition(1.0)))
    assert (alone.negative, alone.joint) == (None, None)


def test_beside_a_joint_condition_a_graph_has_no_memory_for_the_others() -> None:
    joint = Condition(arguments={"text": torch.ones(4, 3)}, rows=4)
    given = Conditions(positive=condition(1.0), negative=condition(2.0), joint=joint)
    own = copied(given)
    assert [*arguments_of(given)] == [*arguments_of(own)] == ["joint.text"]
    assert own.positive.arguments == {}
    assert own.negative is not None
    assert own.negative.arguments == {}
    assert own.positive.rows == 2


def test_a_graph_without_guidance_reads_the_positive_condition_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Of two components one may be guided and the other not; both get the conditions of the batch."""
    graphs = ForwardGraphs(torch.device("cuda"))
    joint = Condition(arguments={"text": torch.ones(4, 3)}, rows=4)
    given = Conditions(positive=condition(1.0), negative=condition(2.0), joint=joint)
    seen: list[list[str]] = []

    def recording(predict: Any, streams: Any, time_B: Any, conditions: Any) -> Recording:
        own = copied(conditions)
        predict(streams, time_B, own)
        graph = SimpleNamespace(replay=lambda: None)
        return Recording(graph, streams, time_B, own, streams, ref(own))  # type: ignore[arg-type]

    def plain(_component: str, streams: Any, _time_B: Any, known: Conditions, _: Guidance) -> Any:
        seen.append([*arguments_of(known)])
        return streams

    monkeypatch.setattr(graphs, "_record", recording)
    for scale in (4.0, 1.0, 4.0):
        streams = {"visual": torch.ones(2, 3)}
        graphs.predict(plain, "transformer", streams, torch.ones(2), given, Guidance(scale=scale))
    assert seen == [["joint.text"], ["positive.text"]]


def test_another_shape_dtype_or_value_is_another_graph() -> None:
    def form(**arguments: Any) -> Any:
        return forms_of({"text": torch.zeros(2, 3), **arguments})

    assert form() == form(text=torch.ones(2, 3))
    others = [
        form(text=torch.zeros(2, 4)),
        form(text=torch.zeros(2, 3, dtype=torch.bfloat16)),
        form(lengths=[3, 3]),
        form(lengths=[3, 2]),
    ]
    assert len({form(), *others}) == 5


def test_a_graph_keeps_no_conditions_but_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of a batch are gone with the batch, and the next ones are copied, wherever they lie."""
    graphs = ForwardGraphs(torch.device("cuda"))
    own = Conditions(positive=condition(0.0))

    def recording(_predict: Any, streams: Any, time_B: Any, _conditions: Any) -> Recording:
        graph = SimpleNamespace(replay=lambda: None)
        return Recording(graph, streams, time_B, own, streams, ref(own))  # type: ignore[arg-type]

    monkeypatch.setattr(graphs, "_record", recording)
    for value in (1.0, 2.0, 3.0):
        given = Conditions(positive=condition(value))
        for _ in range(2):
            streams = {"visual": torch.ones(2, 3)}
            graphs.predict(lambda *_: {}, "transformer", streams, torch.ones(2), given, Guidance())
            assert own.positive.arguments["text"].tolist()[0][0] == value
        gone = ref(given)
        del given
        assert gone() is None


def test_forwards_of_ever_new_shapes_are_not_recorded_without_end(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Some families give lengths to their forward: each set of lengths would be another graph."""
    graphs = ForwardGraphs(torch.device("cuda"))
    replayed: list[int] = []

    def recording(_predict: Any, streams: Any, time_B: Any, conditions: Any) -> Recording:
        graph = SimpleNamespace(replay=lambda: replayed.append(1))
        return Recording(graph, streams, time_B, conditions, streams, ref(conditions))  # type: ignore[arg-type]

    monkeypatch.setattr(graphs, "_record", recording)
    launched: list[int] = []

    def plain(_component: str, streams: Any, *_: Any) -> Any:
        launched.append(1)
        return streams

    for _ in range(2):
        for length in range(GRAPHS + 3):
            given = Conditions(positive=condition(1.0, lengths=[length]))
            streams = {"visual": torch.ones(2, 3)}
            made = graphs.predict(plain, "transformer", streams, torch.ones(2), given, Guidance())
            assert torch.equal(made["visual"], torch.ones(2, 3))
    assert (graphs.recorded, len(replayed), len(launched)) == (GRAPHS, 2 * GRAPHS, 2 * 3)
    assert [record.message for record in caplog.records] == [
        f"rollout.local.cuda_graphs: forwards come in more than {GRAPHS} shapes; graphs are kept of the "
        f"first {GRAPHS}, all others are launched kernel by kernel"
    ]

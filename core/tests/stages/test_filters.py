"""Answers of filters: what keeps, what drops, and what is no answer."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy
import pytest
import torch

from drl.errors import ContractError, DataError
from drl.interfaces.data import DataSource
from drl.stages.filters import dropped_by, filter_samples, use_buffer_filter
from drl.types import Context, Dropped, Rollout


@pytest.mark.parametrize(
    "answer", [True, (True, ""), (True, "fine"), torch.tensor(1.0) > 0, numpy.float64(1) > 0]
)
def test_a_group_is_kept(answer: Any) -> None:
    assert dropped_by(answer) is None


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        (False, "filtered"),
        ((False, "dull"), "dull"),
        (Dropped("dull"), "dull"),
        (numpy.float64(1) < 0, "filtered"),
        ((torch.tensor(1.0) < 0, "dull"), "dull"),
    ],
)
def test_a_group_is_dropped_with_its_reason(answer: Any, reason: str) -> None:
    assert dropped_by(answer) == Dropped(reason)


@pytest.mark.parametrize("answer", [None, 0, 1.0, "keep", (False,), (False, ""), (False, 3), []])
def test_what_says_neither_keep_nor_drop_is_a_mistake(answer: Any) -> None:
    with pytest.raises(ContractError, match=r"must return True, False, Dropped\(reason\)"):
        dropped_by(answer)


def test_a_sample_filter_works_in_place_and_an_answer_is_not_lost_in_silence() -> None:
    run: Any = SimpleNamespace(functions=SimpleNamespace(get=lambda option: lambda run, groups: []))
    with pytest.raises(ContractError, match=r"works in place .* a list, which would go unread"):
        filter_samples(run, Rollout(rollout_id=0, version=0, groups=[]))


class NoBuffer(DataSource):
    def take(self, count: int) -> Any:
        return []

    def state(self) -> Any:
        return {}

    def restore(self, state: Any) -> None: ...


def test_a_buffer_filter_needs_a_source_with_a_buffer() -> None:
    run: Any = SimpleNamespace(
        functions=SimpleNamespace(get=lambda option: lambda *given: []),
        source=NoBuffer(None, Context()),
        current=0,
    )
    with pytest.raises(
        DataError, match=r"rollout.buffer_filter has no use: NoBuffer keeps no buffer"
    ):
        use_buffer_filter(run)

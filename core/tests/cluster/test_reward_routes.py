"""Rows that ask for their own reward by ``metadata.rm_type``, and a recipe whose reward is a function."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import numpy
import pytest
import torch

from drl.cluster.rewards import FunctionRewards, InlineRewards, Term, TermSpec
from drl.errors import BadInput, ContractError, DataError
from drl.interfaces.reward import Reward, Workers
from drl.stages.reward import assign_rewards, scores_of
from drl.testing import make_prompt, make_sample
from drl.types import Context, Sample, Score


class Constant(Reward):
    """Gives one number, and counts what it scored."""

    def __init__(self, value: float) -> None:
        super().__init__(None, Context())
        self.value, self.seen, self.running = value, list[int](), 0

    def workers(self) -> Workers:
        return Workers(processes=0)

    async def start(self) -> None:
        self.running += 1

    async def score(self, samples: Sequence[Sample]) -> list[Score]:
        self.seen += [sample.index for sample in samples]
        return [Score(value=self.value) for _ in samples]

    async def close(self) -> None:
        self.running -= 1


def term(name: str, value: float, weight: float = 1.0) -> Term:
    return Term(
        name, weight, Constant(value), TermSpec(plugin=name, options=None, context=Context())
    )


def sample(index: int, rm_type: Any = None) -> Sample:
    made = make_sample(index=index)
    metadata = {} if rm_type is None else {"rm_type": rm_type}
    made.prompt = make_prompt(row=index, metadata=metadata)
    return made


def rewarded(pool: InlineRewards, *samples: Sample) -> list[float | None]:
    scores = asyncio.run(pool.score(samples))
    assign_rewards(samples, scores, pool.weights_of, on_failure="error")
    return [one.reward for one in samples]


def test_a_row_is_scored_by_the_reward_that_it_asks_for_and_by_no_other() -> None:
    usual, other = term("usual", 0.5, 2.0), term("other", 3.0)
    pool = InlineRewards([usual], [other])
    samples = [sample(0), sample(1, "other"), sample(2), sample(3, "usual")]
    assert rewarded(pool, *samples) == [1.0, 3.0, 1.0, 0.5]  # asked for by a row: weight 1
    assert (usual.reward.seen, other.reward.seen) == ([0, 2, 3], [1])
    assert [list(one.scores) for one in samples] == [["usual"], ["other"], ["usual"], ["usual"]]
    assert pool.weights == {"usual": 2.0, "other": 1.0}


def test_a_reward_for_some_rows_is_started_and_closed_like_the_others() -> None:
    usual, other = term("usual", 0.5), term("other", 3.0)
    pool = InlineRewards([usual], [other])
    asyncio.run(pool.start())
    assert (usual.reward.running, other.reward.running) == (1, 1)
    asyncio.run(pool.close())
    assert (usual.reward.running, other.reward.running) == (0, 0)


def test_a_reward_that_the_run_does_not_have_names_row_and_rewards() -> None:
    with pytest.raises(
        BadInput, match=r"row 4: metadata.rm_type asks for .* 'ocr'; there is 'usual'"
    ):
        rewarded(InlineRewards([term("usual", 0.5)]), sample(4, "ocr"))


@pytest.mark.parametrize("name", [3, "", ["ocr"]])
def test_what_is_no_name_is_named_with_its_row(name: Any) -> None:
    with pytest.raises(DataError, match=r"prompt row 4: metadata.rm_type must be the name"):
        rewarded(InlineRewards([term("usual", 0.5)]), sample(4, name))


def custom(answer: Any, *samples: Sample) -> list[float | None]:
    async def score(run: Any, samples: Sequence[Sample]) -> Any:
        return answer

    run: Any = SimpleNamespace(functions=SimpleNamespace(get={"reward.custom": score}.get))
    scores = asyncio.run(scores_of(run, samples))
    pool = FunctionRewards()
    assign_rewards(samples, scores, pool.weights_of, on_failure="mask")
    return [one.reward for one in samples]


@pytest.mark.parametrize(
    "answer",
    [[0.5, 2], (0.5, 2.0), torch.tensor([0.5, 2.0]), numpy.array([0.5, 2.0], dtype="float32")],
)
def test_a_function_gives_one_number_per_sample(answer: Any) -> None:
    assert custom(answer, sample(0), sample(1, "never asked")) == [0.5, 2.0]


def test_a_number_that_is_none_is_a_failed_score() -> None:
    one = sample(0)
    assert custom([float("nan")], one) == [None]
    assert one.scores["custom"].failure == "reward.custom returned nan"


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        ([0.5], "reward.custom returned 1 scores for 2 samples"),
        (None, "one number per sample, got a NoneType"),
        (0.5, "one number per sample, got a float"),
        ([0.5, "high"], "score 1 is a str"),
        ([0.5, None], "score 1 is a NoneType"),
        ([0.5, torch.zeros(2)], "score 1 is a Tensor"),
    ],
)
def test_what_a_function_returns_instead_is_named(answer: Any, said: str) -> None:
    with pytest.raises(ContractError, match=said):
        custom(answer, sample(0), sample(1))


def test_there_is_nothing_to_start_behind_a_function() -> None:
    pool = FunctionRewards()
    asyncio.run(pool.start())
    asyncio.run(pool.check_golden())
    asyncio.run(pool.close())
    assert (pool.weights, pool.wants_groups) == ({"custom": 1.0}, False)

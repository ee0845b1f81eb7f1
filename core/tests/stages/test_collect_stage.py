"""Collecting with small parts: draws, over-sampling, the buffer, filters and rewards."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from small_collect import drawn, dropping, made, runs_in

from drl.builtin.functions_rollout import zero_std
from drl.errors import BadInput, ContractError, TrustError
from drl.interfaces.data import DataSource
from drl.stages.collect import collect
from drl.types import Context, Dropped, Group, Prompt


@pytest.fixture
def run_of(tmp_path: Path) -> Any:
    """Makes a run over eight prompts."""
    return runs_in(tmp_path)


@pytest.mark.parametrize("order", range(6))
def test_over_sampling_keeps_the_first_groups_by_number_whoever_is_done_first(
    run_of: Any, order: int
) -> None:
    run = run_of(order=order, drop=dropping(0, 3), rollout__over_sampling_batch_size=4)
    rollout = collect(run, 0)
    assert drawn(rollout) == [(1, 2), (2, 3)]
    assert rollout.dropped == {"dull": 2}
    assert run.counters.next_group == 4  # one draw was enough
    assert "rollout/surplus_groups" not in rollout.metrics


@pytest.mark.parametrize("order", range(4))
def test_a_draw_that_falls_short_is_followed_by_another_of_the_same_size(
    run_of: Any, order: int
) -> None:
    run = run_of(order=order, drop=dropping(0, 1, 2), rollout__over_sampling_batch_size=3)
    rollout = collect(run, 0)
    assert drawn(rollout) == [(3, 4), (4, 5)]
    assert run.counters.next_group == 6
    assert rollout.metrics == {"rollout/surplus_groups": 1.0}  # group 5, made and left out
    assert run.source.state()["buffer"] == []


def test_without_over_sampling_just_what_is_missing_is_drawn(run_of: Any) -> None:
    run = run_of(drop=dropping(0, 2))
    assert drawn(collect(run, 0)) == [(1, 2), (3, 4)]
    assert run.counters.next_group == 4


def test_filters_that_drop_too_much_stop_after_max_draws_batches_of_the_drawn_size(
    run_of: Any,
) -> None:
    run = run_of(
        drop=dropping(*range(99)), rollout__over_sampling_batch_size=3, rollout__max_draws=2
    )
    with pytest.raises(BadInput, match=r"6 groups were drawn for a batch of 2.*'dull': 6"):
        collect(run, 0)


class Stingy(DataSource):
    def take(self, count: int) -> list[Prompt]:
        return [Prompt(row=1, text="one")]

    def state(self) -> dict[str, Any]:
        return {}

    def restore(self, state: Any) -> None: ...


def test_a_source_that_gives_too_few_prompts_is_named_and_nothing_waits_for_ever(
    run_of: Any,
) -> None:
    run = run_of()
    run.source = Stingy(None, Context())
    with pytest.raises(ContractError, match="Stingy was asked for 2 prompts and gave 1"):
        collect(run, 0)


def newest(run: Any, rollout_id: int, buffer: list[Group], count: int) -> list[Group]:
    run.seen = (rollout_id, [(g.group_index, [s.reward for s in g.samples]) for g in buffer])
    return [buffer.pop() for _ in range(min(count, len(buffer)))]


BUFFERED = {"rollout__over_sampling_batch_size": 4, "rollout__buffer_filter": "mine:newest"}


def test_surplus_groups_wait_in_the_buffer_and_the_filter_says_which_comes_first(
    run_of: Any,
) -> None:
    run = run_of({"rollout.buffer_filter": newest}, **BUFFERED)
    assert drawn(collect(run, 0)) == [(0, 1), (1, 2)]
    run.current = 1
    assert drawn(collect(run, 1)) == [(4, 4), (5, 3)]  # rows 4 and 3 again, as new groups
    assert run.seen == (1, [(2, [3.0, 3.5]), (3, [4.0, 4.5])])


def test_a_resumed_run_finds_its_buffer_as_it_left_it(run_of: Any) -> None:
    straight = run_of({"rollout.buffer_filter": newest}, **BUFFERED)
    collect(straight, 0)
    state = json.loads(json.dumps(straight.source.state()))
    resumed = run_of({"rollout.buffer_filter": newest}, **BUFFERED)
    resumed.source.restore(state)
    resumed.counters.next_group = straight.counters.next_group
    assert drawn(collect(resumed, 1)) == drawn(collect(straight, 1))
    assert resumed.seen == straight.seen


@pytest.mark.parametrize(
    "answer", [False, (False, "plain"), Dropped("plain"), torch.tensor(0.0) > 1]
)
def test_the_filter_of_the_recipe_drops_groups_in_every_way_that_it_may_say_so(
    run_of: Any, answer: Any
) -> None:
    def decide(run: Any, group: Group) -> Any:
        return answer if group.group_index == 0 else True

    rollout = collect(run_of({"rollout.dynamic_sampling_filter": decide}), 0)
    assert drawn(rollout) == [(1, 2), (2, 3)]
    reason = "plain" if "plain" in str(answer) else "filtered"
    assert rollout.dropped == {reason: 1}


def test_plugins_are_asked_before_the_filter_of_the_recipe(run_of: Any) -> None:
    asked: list[int] = []

    def decide(run: Any, group: Group) -> bool:
        asked.append(group.group_index)
        return True

    run = run_of({"rollout.dynamic_sampling_filter": decide}, drop=dropping(1))
    assert collect(run, 0).dropped == {"dull": 1}
    assert sorted(asked) == [0, 2]


def equal_first(run: Any, samples: Any) -> Any:
    async def score() -> list[float]:
        return [0.5 if s.group_index == 0 else float(s.member) for s in samples]

    return score()


def test_zero_std_replaces_a_group_without_spread(run_of: Any) -> None:
    functions = {"rollout.dynamic_sampling_filter": zero_std, "reward.custom": equal_first}
    rollout = collect(run_of(functions), 0)
    assert rollout.dropped == {"zero_std_0.5": 1}
    assert drawn(rollout) == [(1, 2), (2, 3)]


def test_a_sample_filter_sees_all_kept_groups_in_order_and_before_the_plugins(run_of: Any) -> None:
    seen: list[Any] = []

    def mark(run: Any, groups: Any) -> None:
        seen.append([group.group_index for group in groups])
        groups[1].samples[0].remove_sample = True

    run = run_of({"rollout.sample_filter": mark})
    run.hooks.drl_rollout_finished = lambda run, rollout: seen.append(
        [sample.index for sample in rollout.samples if sample.removed]
    )
    collect(run, 0)
    assert seen == [[0, 1], [2]]


@pytest.mark.parametrize(("group", "sizes"), [(False, [1] * 4), (True, [2] * 2)])
def test_rewards_see_microgroups_or_whole_groups(
    run_of: Any, group: bool, sizes: list[int]
) -> None:
    run = run_of(reward__group=group)
    samples = collect(run, 0).samples
    calls = run.rewards.terms[0].reward.calls
    assert sorted(map(len, calls)) == sizes
    assert sorted(itertools.chain(*calls)) == [0, 1, 2, 3]
    assert [sample.reward for sample in samples] == [1.0, 1.5, 2.0, 2.5]


def test_a_part_of_the_score_may_be_the_reward(run_of: Any) -> None:
    samples = collect(run_of(reward__key="member"), 0).samples
    assert [sample.reward for sample in samples] == [0.0, 1.0, 0.0, 1.0]


def test_the_engine_request_may_be_made_by_a_function(run_of: Any) -> None:
    async def brighter(run: Any, request: Any, sampling: Any, *, evaluation: bool) -> Any:
        assert (sampling, evaluation) == (request.sampling, False)
        samples = await run.engines.generate(request)
        for sample in samples:
            sample.media.pixels.fill_(0.75)
        return samples

    run = run_of({"rollout.custom_generate": brighter})
    samples = collect(run, 0).samples
    assert len(run.engines.asked) == 4
    assert all(bool((sample.media.pixels == 0.75).all()) for sample in samples)


@pytest.mark.parametrize(
    ("wrong", "error", "said"),
    [
        (lambda request: None, ContractError, "got a NoneType"),
        (lambda request: [3], ContractError, "got a list of int"),
        (lambda request: [], TrustError, "asked for 1 samples, got 0"),
        (
            lambda request: [made(request, request.seeds[0] + 1, request.members[0])],
            TrustError,
            "asked for seed",
        ),
    ],
)
def test_what_a_generate_function_returns_is_held_against_its_request(
    run_of: Any, wrong: Any, error: type[Exception], said: str
) -> None:
    async def broken(run: Any, request: Any, sampling: Any, *, evaluation: bool) -> Any:
        return wrong(request)

    with pytest.raises(error, match=said):
        collect(run_of({"rollout.custom_generate": broken}), 0)

"""Models of two experts: one trains in each optimizer step, the same on every rank."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from drl.api import VISUAL, BadInput, Context, Pair, Routes, Sample, Shard, StepContext
from drl.interfaces.family import Route
from drl.stages.pairs import make_shards
from drl.testing.builders import make_sample
from drl.types import Group, Rollout
from drl_loss_sft.config import SftLossConfig
from drl_loss_sft.loss import SftLoss

BOUNDARY = 875.0
HIGH, LOW = "transformer", "transformer_2"


def expert_at(timestep: float) -> str:
    """High noise is the first expert's, as in Wan 2.2."""
    return HIGH if timestep >= BOUNDARY else LOW


def context_of(*components: str, window: int = 0, rollout_id: int = 0) -> StepContext:
    routes = Routes(components=components, component_at=expert_at)
    return StepContext(seed=5, routes=routes, window=window, rollout_id=rollout_id)


def sft(**options: Any) -> SftLoss:
    return SftLoss(SftLossConfig(**options), Context())


def record(index: int) -> Sample:
    sample = make_sample(index=index, group_index=index)
    sample.clean = {VISUAL: torch.zeros(2, 1, 2, 2)}
    return sample


def draw(loss: SftLoss, context: StepContext, count: int = 20) -> list[Pair]:
    return [pair for index in range(count) for pair in loss.expand([record(index)], None, context)]


def experts(pairs: Sequence[Pair]) -> set[str]:
    return {expert_at(pair.timestep) for pair in pairs if pair.timestep is not None}


@pytest.mark.parametrize("sigma", ["grid", "logit_normal"])
def test_all_samples_of_a_window_belong_to_one_expert(sigma: str) -> None:
    loss = sft(sigma=sigma, flow_shift=5.0)
    for window in range(6):
        pairs = draw(loss, context_of(HIGH, LOW, window=window))
        assert len(experts(pairs)) == 1
        assert len({pair.sigma for pair in pairs}) > 10, "levels differ by sample"
        assert all(pair.timestep == pair.sigma * 1000 for pair in pairs)


def test_the_choice_is_a_function_of_the_step_and_not_of_the_rank() -> None:
    loss, here = sft(), context_of(HIGH, LOW, window=3)
    other = replace(here, rank=1, world=2)
    assert [pair.sigma for pair in draw(loss, here)] == [pair.sigma for pair in draw(loss, other)]


def test_experts_train_as_often_as_the_grid_has_levels_of_theirs() -> None:
    """Of the even grid one level of eight lies at 875 or above, five of twelve of the shift-5 grid."""
    for shift, share in ((1.0, 0.126), (5.0, 0.417)):
        loss = sft(flow_shift=shift)
        chosen = [
            experts(draw(loss, context_of(HIGH, LOW, window=window, rollout_id=rollout), 1))
            for rollout in range(50)
            for window in range(8)
        ]
        high = sum(found == {HIGH} for found in chosen) / len(chosen)
        assert high == pytest.approx(share, abs=0.08)


@pytest.mark.parametrize("only", [HIGH, LOW])
def test_a_single_loaded_expert_draws_from_its_own_levels(only: str) -> None:
    for window in range(4):
        assert experts(draw(sft(), context_of(only, window=window))) == {only}


def test_levels_within_an_expert_are_drawn_alike() -> None:
    """The even grid above 0.875 has its mean at 0.9375."""
    pairs = draw(sft(), context_of(HIGH), 400)
    mean = sum(pair.sigma for pair in pairs) / len(pairs)
    assert mean == pytest.approx(0.9375, abs=0.006)
    assert min(pair.sigma for pair in pairs) >= 0.875


def test_an_expert_without_levels_is_refused() -> None:
    with pytest.raises(BadInput, match=r"model\.components: none of 10000 .* belongs to acme"):
        draw(sft(), context_of("acme"), 1)


def test_one_component_draws_as_before() -> None:
    (pair,) = draw(sft(), StepContext(seed=5), 1)
    assert pair.timestep is None
    assert pair.component == "transformer"


def shards_on(ranks: int, *, components: Sequence[str] = (HIGH, LOW)) -> list[Shard]:
    """Lay eight records out in four windows, through core, for a family of two experts."""
    train = SimpleNamespace(
        train_only=True,
        global_batch_size=2,
        num_steps_per_rollout=4,
        micro_batch_size=1,
        micro_batch_size_sample=None,
        micro_batch_size_tstep=None,
        iter_order="sample_major",
        dp_split_mode="contiguous",
    )
    rollout = SimpleNamespace(
        batch_size=8, n_samples_per_prompt=1, custom_convert=None, custom_expand=None
    )
    cluster = SimpleNamespace(actor_num_nodes=1, actor_num_gpus_per_node=ranks)
    family = SimpleNamespace(
        components=(HIGH, LOW), route=lambda timestep: Route(component=expert_at(timestep))
    )
    run: Any = SimpleNamespace(
        recipe=SimpleNamespace(train=train, rollout=rollout, cluster=cluster),
        family=family,
        components=dict.fromkeys(components),
        functions={},
        loss=sft(flow_shift=3.0),
        ranks=ranks,
        step_context=lambda rollout_id: StepContext(seed=5, rollout_id=rollout_id),
    )
    groups = [
        Group(group_index=index, prompt=sample.prompt, samples=[sample])
        for index, sample in enumerate(map(record, range(8)))
    ]
    return make_shards(run, Rollout(rollout_id=2, version=0, groups=groups), None)


def test_ranks_run_the_same_expert_at_the_same_time() -> None:
    (alone,), together = shards_on(1), shards_on(2)
    for window, batches in enumerate(alone.windows):
        components = {pair.component for batch in batches for pair in batch}
        assert len(components) == 1
        for shard in together:
            assert {p.component for b in shard.windows[window] for p in b} == components
    found = {pair.component for window in alone.windows for batch in window for pair in batch}
    assert found == {HIGH, LOW}, "both train in the course of a rollout"
    sigmas = {pair.id: pair.sigma for window in alone.windows for batch in window for pair in batch}
    assert all(
        sigmas[pair.id] == pair.sigma
        for shard in together
        for window in shard.windows
        for batch in window
        for pair in batch
    )


def test_only_trained_experts_get_pairs() -> None:
    (shard,) = shards_on(1, components=(LOW,))
    assert {p.component for window in shard.windows for b in window for p in b} == {LOW}

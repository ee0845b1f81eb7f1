"""Preferences on several ranks: both pictures of one are on one rank, and the gradient is that of one rank."""

from __future__ import annotations

from functools import partial

import pytest
from ranked_dpo import compare_with_one_rank, shards_for

from drl.cluster.ranks import RankedTrainer, RankGroup
from drl.model.parallel import RankSettings
from drl.types import VISUAL, rejected


@pytest.mark.parametrize("world", [2, pytest.param(3, marks=pytest.mark.slow)])
def test_ranks_find_the_gradient_of_one(world: int) -> None:
    group = RankGroup(RankSettings(world=world, device="cpu"))
    build = partial(compare_with_one_rank, (1, 4, 7))
    RankedTrainer(group.start(build, build), group).close()


@pytest.mark.parametrize("world", [1, 2, 3])
def test_a_preference_is_one_row_with_both_pictures(world: int) -> None:
    shards = shards_for(7, world)
    rows = [pair for shard in shards for batch in shard.windows[0] for pair in batch]
    assert sorted(pair.unit for pair in rows if pair.weight > 0) == [0, 1, 3, 4, 6]
    assert all(set(pair.tensors) == {VISUAL, rejected(VISUAL)} for pair in rows)
    assert {shard.window_weights[0] for shard in shards} == {5.0}

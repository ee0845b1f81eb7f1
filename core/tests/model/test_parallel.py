"""Sharded components and the ranks' arithmetic, in real processes over gloo (``tests/ranked_checks.py``)."""

from __future__ import annotations

import pytest
from ranked_checks import CHECKS, OUTCOMES, run_checks
from ranked_sockets import LISTENING, listening
from ranked_trainer import start

from drl.model.parallel import ALONE, Ranks, sum_whole_gradients


def run_on(world: int, **settings: int) -> dict[str, str]:
    LISTENING.update(listening())
    trainer = start(run_checks, world, **settings)
    outcomes = dict(OUTCOMES)
    trainer.close()
    return outcomes


@pytest.fixture(scope="module")
def two() -> dict[str, str]:
    """What two ranks say about each check."""
    return run_on(2)


@pytest.fixture(scope="module")
def four() -> dict[str, str]:
    """What four ranks say, of which two hold a copy of the other two's shards."""
    return run_on(4, replicas=2)


@pytest.mark.parametrize("check", CHECKS)
def test_on_two_ranks(two: dict[str, str], check: str) -> None:
    assert not two[check], two[check]


@pytest.mark.slow
@pytest.mark.parametrize("check", CHECKS)
def test_on_four_ranks_with_two_copies(four: dict[str, str], check: str) -> None:
    if check == "only_frozen_weights_are_sharded_beside_adapters":
        pytest.skip("counts the rows of one copy")
    assert not four[check], four[check]


def test_one_rank_has_nobody_to_ask() -> None:
    assert Ranks(rank=0, world=1, mesh=None, save_group=None) == ALONE
    assert ALONE.gather("alone") == ["alone"]
    assert ALONE.broadcast("alone") == "alone"
    assert ALONE.any(True)
    sum_whole_gradients([], ALONE)

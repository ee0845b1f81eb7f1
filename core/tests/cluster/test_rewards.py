"""Reward terms in this process and in a worker; what travels, what fails."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace

import numpy
import pytest
import torch

from drl.catalog import Catalog
from drl.cluster.rewards import InlineRewards, Term, TermSpec, light, pack, unpack
from drl.errors import ContractError, RewardError
from drl.interfaces.reward import Golden, Reward, Workers
from drl.testing import make_sample
from drl.types import Context, Score


class Brightness(Reward):
    """Mean of the picture; optionally one score short, or upside down."""

    def __init__(self, *, short=0, sign=1.0):
        super().__init__(None, Context())
        self.short, self.sign, self.closed = short, sign, 0

    def workers(self):
        return Workers(processes=0)

    async def score(self, samples):
        values = [Score(value=self.sign * s.media.pixels.mean().item()) for s in samples]
        return values[: len(values) - self.short]

    def golden(self):
        white, black = (make_sample(pixels=torch.full((3, 1, 4, 4), v)) for v in (1.0, 0.0))
        return Golden(good=white, bad=black, margin=0.5)

    async def close(self):
        self.closed += 1


def term(reward, name="light", weight=1.0):
    return Term(name, weight, reward, TermSpec(plugin=name, options=None, context=Context()))


def test_scores_come_back_in_order_by_term():
    pool = InlineRewards([term(Brightness()), term(Brightness(sign=-1.0), "dark", 0.5)])
    samples = [make_sample(seed=n) for n in range(3)]
    scores = asyncio.run(pool.score(samples))
    assert [row["light"].value for row in scores] == [s.media.pixels.mean().item() for s in samples]
    assert [row["dark"].value for row in scores] == [-row["light"].value for row in scores]
    assert pool.weights == {"light": 1.0, "dark": 0.5}


def test_a_missing_score_names_the_term():
    with pytest.raises(ContractError, match="'light' returned 1 scores for 2"):
        asyncio.run(InlineRewards([term(Brightness(short=1))]).score([make_sample()] * 2))


def test_a_reward_that_fails_its_golden_pair_never_starts_a_run():
    asyncio.run(InlineRewards([term(Brightness())]).check_golden())
    with pytest.raises(RewardError, match="fails its own test"):
        asyncio.run(InlineRewards([term(Brightness(sign=-1.0))]).check_golden())


def test_a_reward_sees_only_what_it_may_see():
    sample = make_sample(steps=2, reward=0.5)
    seen = light(sample)
    assert seen.trajectory is None
    assert seen.reward is None
    assert seen.media is sample.media


def test_samples_survive_the_way_to_a_worker():
    sample = make_sample(index=4, group_index=2, member=1, seed=9)
    packed = pack(sample)
    assert isinstance(packed.pixels, numpy.ndarray)
    back = unpack(packed)
    assert torch.equal(back.media.pixels, sample.media.pixels)
    assert (back.index, back.group_index, back.member, back.seed) == (4, 2, 1, 9)
    assert back.prompt.text == sample.prompt.text


def test_closing_twice_is_harmless():
    reward = Brightness()
    pool = InlineRewards([term(reward)])
    asyncio.run(pool.close())
    asyncio.run(pool.close())
    assert reward.closed == 2


@pytest.fixture
def worker():
    """A term whose reward lives in a spawned process."""
    catalog = Catalog.load()
    options = catalog.options_model("reward", "jpeg")()
    reward = catalog.create("reward", "jpeg", options, Context(section=SimpleNamespace()))
    reward.workers = lambda: Workers(processes=1)
    spec = TermSpec(plugin="jpeg", options=options.model_dump(), context=Context())
    made = Term("jpeg", 1.0, reward, spec)
    yield made, catalog, options
    asyncio.run(made.close())


def test_a_worker_scores_as_this_process_does_and_its_death_is_named(worker):
    made, catalog, options = worker
    samples = [make_sample(seed=n) for n in range(3)]

    async def both():
        await made.start()
        return await made.score(samples)

    here = catalog.create("reward", "jpeg", options, Context())
    assert asyncio.run(both()) == asyncio.run(here.score(samples))
    for process in list(made.executor._processes.values()):
        process.kill()
    with pytest.raises(RewardError, match="'jpeg': its worker process died"):
        asyncio.run(made.score(samples))

"""The pool of one engine: how many requests are in flight."""

from __future__ import annotations

import asyncio
from contextlib import closing
from typing import Any

import pytest

from drl.cluster.background import Background
from drl.cluster.engines import InlineEngines


class Counting:
    """An engine that counts the requests that are in flight at once."""

    def __init__(self) -> None:
        self.now = self.most = self.done = 0

    async def generate(self, request: int) -> list[int]:
        self.now += 1
        self.most = max(self.most, self.now)
        for _ in range(3):
            await asyncio.sleep(0)
        self.now -= 1
        self.done += 1
        if request < 0:
            raise ValueError(request)
        return [request]


@pytest.mark.parametrize(("limit", "most"), [(1, 1), (3, 3), (512, 10)])
def test_at_most_so_many_requests_are_in_flight(limit: int, most: int) -> None:
    engine: Any = Counting()
    with closing(Background()) as background:
        pool: Any = InlineEngines("counting", engine, background, limit)

        async def all_at_once() -> list[list[int]]:
            return await asyncio.gather(*(pool.generate(n) for n in range(10)))

        assert background.run(all_at_once()) == [[n] for n in range(10)]
    assert engine.most == most


def test_a_request_that_fails_gives_its_slot_back() -> None:
    engine: Any = Counting()
    with closing(Background()) as background:
        pool: Any = InlineEngines("counting", engine, background, 1)

        async def one_after_another() -> list[Any]:
            return await asyncio.gather(
                *(pool.generate(n) for n in (-1, 2)), return_exceptions=True
            )

        failed, fine = background.run(one_after_another())
    assert isinstance(failed, ValueError)
    assert fine == [2]

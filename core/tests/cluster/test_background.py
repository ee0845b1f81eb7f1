"""A blocking caller over an event loop in another thread."""

from __future__ import annotations

import asyncio
import threading

import pytest

from drl.cluster.background import Background


@pytest.fixture
def background():
    made = Background()
    yield made
    made.close()


def test_results_and_errors_reach_the_caller(background):
    async def work(value):
        await asyncio.sleep(0)
        if value is None:
            raise ValueError("nothing")
        return value, threading.current_thread().name

    assert background.run(work(3)) == (3, "drl-io")
    with pytest.raises(ValueError, match="nothing"):
        background.run(work(None))


def test_tasks_share_the_loop_between_calls(background):
    async def start():
        return asyncio.create_task(asyncio.sleep(0, "late"))

    task = background.run(start())

    async def wait():
        return await task

    assert background.run(wait()) == "late"


def test_closing_twice_is_harmless():
    made = Background()
    made.close()
    made.close()
    assert not made.thread.is_alive()

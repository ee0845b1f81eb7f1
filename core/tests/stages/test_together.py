"""Work side by side: results in order, and nobody left behind when one fails."""

from __future__ import annotations

import asyncio

import pytest

from drl.stages.together import end_tasks, together


class Work:
    """Pieces of work that note when they start, finish and are ended early."""

    def __init__(self) -> None:
        self.log: list[str] = []

    async def piece(self, name: str, turns: int = 0, fail: str = "") -> str:
        self.log.append(f"{name} starts")
        try:
            for _ in range(turns):
                await asyncio.sleep(0)
            if fail:
                raise ValueError(fail)
        except asyncio.CancelledError:
            await asyncio.sleep(0)  # cleaning up takes a turn too
            self.log.append(f"{name} cleaned up")
            raise
        self.log.append(f"{name} done")
        return name


def test_results_come_in_the_order_of_the_work_not_of_its_end() -> None:
    work = Work()
    pieces = [work.piece("slow", 9), work.piece("fast"), work.piece("middle", 3)]
    assert asyncio.run(together(pieces)) == ["slow", "fast", "middle"]
    done = [line for line in work.log if line.endswith("done")]
    assert done == ["fast done", "middle done", "slow done"]


def test_nothing_to_do_gives_nothing() -> None:
    assert asyncio.run(together([])) == []


def test_the_first_failure_is_raised_once_the_others_have_ended() -> None:
    work = Work()

    async def run() -> list[str]:
        pieces = [
            work.piece("long", 1000),
            work.piece("bad", 2, fail="broken"),
            work.piece("quick"),
        ]
        with pytest.raises(ValueError, match="broken"):
            await together(pieces)
        return list(work.log)  # at this moment, before the loop ends what is left

    log = asyncio.run(run())
    assert "long cleaned up" in log
    assert "quick done" in log
    assert "long done" not in log


def test_of_two_failures_the_first_is_told_and_the_second_does_not_hide_it() -> None:
    work = Work()
    pieces = [work.piece("later", 5, fail="second"), work.piece("sooner", 1, fail="first")]
    with pytest.raises(ValueError, match="first"):
        asyncio.run(together(pieces))


def test_who_is_cancelled_takes_all_pieces_along() -> None:
    work = Work()

    async def impatient() -> None:
        await asyncio.wait_for(together([work.piece("a", 10**6), work.piece("b", 10**6)]), 0.05)

    with pytest.raises(TimeoutError):
        asyncio.run(impatient())
    assert sorted(work.log[2:]) == ["a cleaned up", "b cleaned up"]


def test_ending_tasks_waits_for_them_and_drops_their_failures() -> None:
    work = Work()

    async def end() -> list[bool]:
        tasks = [
            asyncio.ensure_future(work.piece("running", 10**6)),
            asyncio.ensure_future(work.piece("failed", fail="nobody waits")),
            asyncio.ensure_future(work.piece("over")),
        ]
        await asyncio.sleep(0)
        await end_tasks(iter(tasks))
        return [task.cancelled() for task in tasks]

    assert asyncio.run(end()) == [True, False, False]
    assert "running cleaned up" in work.log

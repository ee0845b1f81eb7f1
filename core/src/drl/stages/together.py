"""Coroutines side by side, none of which outlives the one that asked for them."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Iterable
from typing import TypeVar

Result = TypeVar("Result")


async def together(works: Iterable[Awaitable[Result]]) -> list[Result]:
    """Return all results in order; the first failure ends the others before it is raised."""
    tasks = [asyncio.ensure_future(work) for work in works]
    try:
        return await asyncio.gather(*tasks)
    finally:
        await end_tasks(tasks)


async def end_tasks(tasks: Iterable[asyncio.Future[Result]]) -> None:
    """Cancel what still runs and wait for it; failures of tasks that nobody waits for are dropped."""
    tasks = list(tasks)
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)

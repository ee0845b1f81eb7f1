"""A command with a limit in seconds, none of whose processes outlives it."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from uuid import uuid4

MARK = "DRL_BENCHMARK_CASE"
"""Environment variable that every process of a command inherits, whoever its parent is later."""
PATIENCE = 20.0
"""Seconds until a killed process has given its memory back."""


def run_limited(words: Sequence[str], limit: float | None) -> int | None:
    """Run a command; return its exit code, or None when it took longer than ``limit`` seconds.

    Whatever it started ends with it. TimeoutError when something survives being killed.
    """
    value = uuid4().hex
    process = subprocess.Popen(words, env={**os.environ, MARK: value})
    try:
        return process.wait(limit)
    except subprocess.TimeoutExpired:
        return None
    finally:
        end(f"{MARK}={value}")
        process.wait()


def end(mark: str) -> None:
    """Kill all processes with the mark, and wait until they are gone."""
    stopped: set[int] = set()
    while new := marked(mark) - stopped:
        for pid in new:
            send(pid, signal.SIGSTOP)  # first all of them: one that runs could start another
        stopped |= new
    for pid in stopped:
        send(pid, signal.SIGKILL)
    deadline = time.monotonic() + PATIENCE
    # a process loses its environment a moment before it has ended
    while left := marked(mark) | {pid for pid in stopped if not ended(pid)}:
        if time.monotonic() > deadline:
            raise TimeoutError(f"processes {sorted(left)} do not end")
        time.sleep(0.05)


def marked(mark: str) -> set[int]:
    """Return the processes whose environment has the mark; those that have ended have none."""
    found = set()
    for file in Path("/proc").glob("[0-9]*/environ"):
        with suppress(OSError):  # it has just ended, or is another user's
            if mark.encode() in file.read_bytes().split(b"\0"):
                found.add(int(file.parent.name))
    return found


def ended(pid: int) -> bool:
    """Return whether a process has ended; who has not been waited for yet has."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return True
    return state in "ZX"


def send(pid: int, number: signal.Signals) -> None:
    """Send a signal; one that has just ended does not mind."""
    with suppress(ProcessLookupError):
        os.kill(pid, number)

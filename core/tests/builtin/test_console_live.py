"""The live view in a terminal of this process: what stands at the bottom, what moves up."""

from __future__ import annotations

import io
import os
import pty
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from threading import RLock, Thread
from typing import TextIO

import pytest

from drl.api import Context, RunFacts
from drl.builtin.config_loggers import ConsoleOptions
from drl.builtin.console_facts import Progress, evaluations, sparkline
from drl.builtin.console_live import EVENTS, LiveView
from drl.builtin.logger_console import ConsoleLogger, is_terminal

Read = Callable[[], str]


@pytest.fixture
def terminal(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[TextIO, Read]]:
    """A terminal of 100 columns, and what was written to it once it is closed."""
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "100")
    ours, theirs = pty.openpty()
    stream = os.fdopen(theirs, "w", encoding="utf-8")
    output = bytearray()

    def drain() -> None:
        try:
            while chunk := os.read(ours, 65536):
                output.extend(chunk)
        except OSError:  # on Linux the end of a terminal is an error
            return

    reader = Thread(target=drain)
    reader.start()

    def read() -> str:
        if not stream.closed:
            stream.close()
        reader.join(10)
        return output.decode("utf-8")

    yield stream, read
    read()
    os.close(ours)


def plain(text: str) -> list[str]:
    """Lines without what moves the cursor and colours."""
    return re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", text).replace("\r", "").split("\n")


def test_events_stand_below_until_newer_ones_push_them_up(
    terminal: tuple[TextIO, Read],
) -> None:
    stream, read = terminal
    progress = Progress(first=0, total=4, clock=lambda: 0.0)
    view = LiveView("glyphs", progress, RLock(), stream, 1.0)
    for number in range(EVENTS + 2):
        view.event(f"event {number}")
    assert list(view.events) == ["event 2", "event 3", "event 4"]
    view.close()
    lines = [line.strip() for line in plain(read())]
    last = [line for line in lines if line.startswith("event")][-EVENTS:]
    assert last == ["event 2", "event 3", "event 4"]
    assert "event 0" in lines
    assert any("glyphs" in line for line in lines)


def test_the_logger_draws_figures_and_phases_and_gives_the_cursor_back(
    terminal: tuple[TextIO, Read], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stream, read = terminal
    monkeypatch.setattr("sys.stdout", stream)
    logger = ConsoleLogger(ConsoleOptions(), Context())
    logger.start(RunFacts(name="signs", run_dir=tmp_path, recipe={}, first=2, total=9))
    logger.phase(2, "rollout", 3, 8)
    logger.event("saved iteration 1")
    logger.metrics(1, {"rollout/reward/raw_mean": 0.999})  # before the first: an event already
    logger.metrics(2, {"rollout/reward/raw_mean": 0.375, "perf/images_per_second": 12.5})
    logger.close()
    text = read()
    shown = " ".join(plain(text))
    for words in ("signs", "rollout  3/8", "saved iteration 1", "reward 0.375", "12.5 images/s"):
        assert words in shown
    assert "0.999" not in shown
    assert text.rindex("\x1b[?25h") > text.rindex("\x1b[?25l")  # the cursor is shown again


@pytest.mark.parametrize(
    ("encoding", "term", "live"),
    [
        ("utf-8", "xterm", True),
        ("UTF-8", "xterm", True),
        ("utf8", "xterm", True),
        ("ascii", "xterm", False),
        ("latin-1", "xterm", False),
        ("utf-8", "dumb", False),
        ("utf-8", "unknown", False),
    ],
)
def test_only_a_terminal_that_can_show_it_gets_the_live_view(
    terminal: tuple[TextIO, Read],
    monkeypatch: pytest.MonkeyPatch,
    encoding: str,
    term: str,
    live: bool,
) -> None:
    monkeypatch.setenv("TERM", term)
    with os.fdopen(os.dup(terminal[0].fileno()), "w", encoding=encoding) as stream:
        assert is_terminal(stream) is live
    assert not is_terminal(io.TextIOWrapper(io.BytesIO(), encoding=encoding))


def test_plain_lines_arrive_one_by_one_without_waiting_for_the_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "out.txt"
    with path.open("w", encoding="ascii") as stream:
        monkeypatch.setattr("sys.stdout", stream)
        logger = ConsoleLogger(ConsoleOptions(), Context())
        logger.start(RunFacts(name="x", run_dir=tmp_path, recipe={}, first=0, total=1))
        logger.event("żółw")
        assert path.read_text() == "???w\n"
        logger.metrics(0, {})
        assert path.read_text().splitlines()[1] == "iteration 1/1"


def test_evaluations_stand_in_the_order_of_their_names() -> None:
    values = {"eval/words": 0.5, "eval/letters": 0.25, "train/loss": 1.0, "evaluation": 2.0}
    assert evaluations(values) == ["eval/letters 0.250", "eval/words 0.500"]


@pytest.mark.parametrize(
    ("values", "bars"),
    [([], ""), ([3.0], "▁"), ([2.0, 2.0], "▁▁"), ([0.0, 7.0], "▁█"), ([*range(8)], "▁▂▃▄▅▆▇█")],
)
def test_a_bar_per_value_between_the_least_and_the_largest(values: list[float], bars: str) -> None:
    assert sparkline(values) == bars

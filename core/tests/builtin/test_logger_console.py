"""The console logger: the text of its lines, its estimate, and a real terminal."""

import io
import os
import pty
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import ClassVar

import pytest

from drl.api import Context, RunFacts
from drl.builtin.config_loggers import ConsoleOptions
from drl.builtin.console_facts import Progress, duration, iteration_line, sparkline
from drl.builtin.logger_console import ConsoleLogger, is_terminal
from drl.testing.contracts.logger import LoggerContract

FIGURES = {
    "rollout/reward/raw_mean": 0.6421,
    "rollout/reward/raw_std": 0.0809,
    "train/ratio_mean": 1.00032,
    "train/clipfrac": 0.004,
    "train/loss": 0.0012,
    "perf/rollout_time": 1.9,
    "perf/overlapped/reward_time": 0.8,
    "perf/train_time": 0.7,
    "perf/update_weights_time": 0.01,
}


def facts(run_dir: Path, first: int = 0, total: int = 80) -> RunFacts:
    return RunFacts(name="glyphs", run_dir=run_dir, recipe={}, first=first, total=total)


class TestConsole(LoggerContract):
    component = ("logger", "console")
    capabilities: ClassVar[Mapping[str, bool]] = {"reads_back": False}


class Clock:
    """Seconds that a test moves by hand."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


def test_a_line_tells_all_there_is(clock: Clock) -> None:
    progress = Progress(first=2, total=80, clock=clock)
    progress.enter(2, "rollout", 0, 8)
    clock.now += 3.4
    progress.finish(2, FIGURES)
    assert iteration_line(progress) == (
        "iteration 3/80  reward 0.642 ±0.081  ratio 1.0003  clip 0.4%  "
        "rollout 1.9s reward 0.8s train 0.7s sync 0.0s  ETA 4m22s"
    )


@pytest.mark.parametrize(
    ("values", "line"),
    [
        ({}, "iteration 1/2"),
        ({"train/loss": 0.00123}, "iteration 1/2  loss 0.00123"),
        ({"rollout/reward/raw_mean": -0.5}, "iteration 1/2  reward -0.500"),
        (
            {"eval/words": 0.75, "perf/train_time": 2.0},
            "iteration 1/2  train 2.0s  eval/words 0.750",
        ),
        ({"perf/step_time": 90.0}, "iteration 1/2  ETA 1m30s"),
    ],
)
def test_what_is_unknown_is_left_out(clock: Clock, values: dict[str, float], line: str) -> None:
    progress = Progress(first=0, total=2, clock=clock)
    progress.finish(0, values)
    assert iteration_line(progress) == line


def test_the_estimate_is_the_median_of_recent_iterations(clock: Clock) -> None:
    progress = Progress(first=0, total=10, clock=clock)
    progress.enter(0, "rollout", 0, 1)
    for step, spent in enumerate((60.0, 2.0, 2.0, 3.0, 2.0)):
        clock.now += spent
        progress.finish(step, {})
    assert progress.remaining_s() == 5 * 2.0
    clock.now += 1.5
    assert progress.remaining_s() == 5 * 2.0 - 1.5
    clock.now += 100
    assert progress.remaining_s() == 4 * 2.0


def test_what_comes_before_the_first_iteration_does_not_count(clock: Clock) -> None:
    progress = Progress(first=0, total=11, clock=clock)
    progress.enter(0, "eval", 0, 1)
    clock.now += 60
    progress.finish(0, {"perf/step_time": 23.0, "perf/eval_time": 20.0})
    assert progress.remaining_s() == 30.0


def test_old_iterations_do_not_count(clock: Clock) -> None:
    progress = Progress(first=0, total=100, clock=clock)
    progress.enter(0, "rollout", 0, 1)
    for step in range(60):
        clock.now += 50.0 if step < 30 else 1.0
        progress.finish(step, {})
    assert progress.remaining_s() == 40.0


def test_there_is_no_estimate_at_the_end_or_before_the_first(clock: Clock) -> None:
    progress = Progress(first=0, total=1, clock=clock)
    assert progress.remaining_s() is None
    progress.finish(0, {"perf/step_time": 2.0})
    assert "ETA" not in iteration_line(progress)


def test_a_phase_keeps_its_clock_while_it_goes_on(clock: Clock) -> None:
    progress = Progress(first=0, total=5, clock=clock)
    progress.enter(0, "rollout", 0, 8)
    clock.now += 2
    progress.enter(0, "rollout", 3, 8)
    assert progress.phase is not None
    assert (progress.phase.started, progress.phase.done) == (100.0, 3)
    progress.enter(0, "train", 0, 2)
    assert (progress.phase.name, progress.phase.started) == ("train", 102.0)


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0.4, "0s"),
        (59.4, "59s"),
        (59.6, "1m00s"),
        (252, "4m12s"),
        (3599.9, "1h00m"),
        (7380, "2h03m"),
    ],
)
def test_durations_are_short(seconds: float, text: str) -> None:
    assert duration(seconds) == text


def test_a_sparkline_reaches_from_least_to_largest() -> None:
    assert sparkline([0.0, 0.5, 1.0]) == "▁▅█"
    assert sparkline([2.0, 2.0]) == "▁▁"
    assert sparkline([]) == ""


def test_plain_lines_go_to_standard_output(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    logger = ConsoleLogger(ConsoleOptions(), Context())
    logger.start(facts(tmp_path, total=2))
    logger.event("weights synced [version 0]")
    logger.phase(0, "rollout", 1, 8)
    logger.metrics(0, {"rollout/reward/raw_mean": 0.5})
    logger.close()
    first, second = capsys.readouterr().out.splitlines()
    assert first == "weights synced [version 0]"
    assert second.startswith("iteration 1/2  reward 0.500")


def test_a_stream_that_knows_ascii_only_gets_ascii(tmp_path: Path) -> None:
    stream = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    logger = ConsoleLogger(ConsoleOptions(), Context())
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "stdout", stream)
        logger.start(facts(tmp_path, total=2))
    logger.metrics(0, FIGURES)
    stream.seek(0)
    assert "reward 0.642 ?0.081" in stream.read()


class Terminal(io.StringIO):
    """A stream that says it is a terminal."""

    encoding = "utf-8"

    def isatty(self) -> bool:
        return True


def test_a_dumb_terminal_gets_plain_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    assert is_terminal(Terminal())
    assert not is_terminal(io.StringIO())
    monkeypatch.setenv("TERM", "dumb")
    assert not is_terminal(Terminal())


def test_without_rich_a_terminal_gets_plain_lines(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stream = Terminal()
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr(sys, "stdout", stream)
    monkeypatch.setitem(sys.modules, "rich.live", None)
    monkeypatch.delitem(sys.modules, "drl.builtin.console_live", raising=False)
    logger = ConsoleLogger(ConsoleOptions(), Context())
    logger.start(facts(tmp_path, total=2))
    logger.metrics(0, FIGURES)
    logger.close()
    assert stream.getvalue().startswith("iteration 1/2  reward 0.642")


def test_the_live_view_can_be_switched_off(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stream = Terminal()
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr(sys, "stdout", stream)
    logger = ConsoleLogger(ConsoleOptions(live=False), Context())
    logger.start(facts(tmp_path))
    logger.event("plain")
    assert stream.getvalue() == "plain\n"


def test_core_needs_no_rich_to_load_its_loggers() -> None:
    code = (
        "import sys; sys.modules['rich'] = None\n"
        "import drl.builtin.loggers, drl.builtin.logger_console, drl.builtin.logger_jsonl"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_the_view_shows_where_the_run_is(clock: Clock) -> None:
    console_live = pytest.importorskip("drl.builtin.console_live")
    progress = Progress(first=0, total=80, clock=clock)
    progress.enter(0, "rollout", 0, 8)
    clock.now += 4
    progress.finish(0, {**FIGURES, "perf/images_per_second": 18.7, "eval/words": 0.61})
    progress.enter(1, "reward", 3, 8)
    clock.now += 1
    shown = console_live.view("glyphs", progress, ["saved [checkpoint 1]"]).plain.splitlines()
    assert shown[0].startswith("glyphs  iteration 2/80  ━")
    assert shown[0].endswith("ETA 5m15s")
    assert shown[1] == "reward  3/8  1s"
    assert shown[2] == "reward 0.642 ±0.081  ratio 1.0003  clip 0.4%  eval/words 0.610  ▁"
    assert shown[3] == "rollout 1.9s reward 0.8s train 0.7s sync 0.0s  18.7 images/s"
    assert shown[4] == "saved [checkpoint 1]"


SCRIPT = """
import signal, sys, time
from pathlib import Path
from typing import ClassVar
from drl.api import Context, RunFacts
from drl.builtin.config_loggers import ConsoleOptions
from drl.builtin.logger_console import ConsoleLogger

# a shell's job in the background, which may be what runs the tests, ignores Ctrl-C; a terminal's does not
signal.signal(signal.SIGINT, signal.default_int_handler)
logger = ConsoleLogger(ConsoleOptions(refresh_per_second=20), Context())
logger.start(RunFacts(name="glyphs", run_dir=Path("."), recipe={}, first=0, total=3))
for step in range(2):
    logger.phase(step, "rollout", 1, 8)
    logger.metrics(step, {"rollout/reward/raw_mean": 0.5 + step / 10})
for number in range(5):
    logger.event(f"event {number} [not markup]")
ENDING
"""
HIDE, SHOW = b"\x1b[?25l", b"\x1b[?25h"


def in_terminal(ending: str, interrupt_after: bytes | None = None) -> tuple[bytes, int]:
    """Run the script in a pseudo-terminal; return what it printed and its exit status."""
    pytest.importorskip("rich")
    parent, child = pty.openpty()
    process = subprocess.Popen(
        [sys.executable, "-c", SCRIPT.replace("ENDING", ending)],
        stdin=child,
        stdout=child,
        stderr=child,
        env={**os.environ, "TERM": "xterm", "PYTHONIOENCODING": "utf-8", "COLUMNS": "100"},
    )
    os.close(child)
    watchdog = threading.Timer(60, process.kill)
    watchdog.start()
    output = b""
    for piece in pieces(parent):
        output += piece
        if interrupt_after is not None and interrupt_after in output:
            interrupt_after = None
            process.send_signal(signal.SIGINT)
    status = process.wait()
    watchdog.cancel()
    os.close(parent)
    return output, status


def pieces(descriptor: int) -> Iterator[bytes]:
    while True:
        try:
            piece = os.read(descriptor, 4096)
        except OSError:  # the other end is closed
            return
        if not piece:
            return
        yield piece


def restored(output: bytes) -> bool:
    return HIDE in output and output.rindex(SHOW) > output.rindex(HIDE)


def test_a_terminal_gets_a_live_view_and_is_restored() -> None:
    output, status = in_terminal("logger.close()")
    assert status == 0
    assert restored(output)
    assert b"iteration 3/3" in output
    assert b"reward 0.600" in output
    assert all(f"event {number} [not markup]".encode() in output for number in range(5))


def test_ctrl_c_restores_the_terminal() -> None:
    output, status = in_terminal(
        "print('ready', flush=True)\ntime.sleep(30)", interrupt_after=b"ready"
    )
    assert status != 0
    assert restored(output)
    assert b"KeyboardInterrupt" in output


def test_an_exception_restores_the_terminal() -> None:
    output, status = in_terminal("raise RuntimeError('broken run')")
    assert status == 1
    assert restored(output)
    assert b"broken run" in output


def test_the_module_that_draws_is_imported_for_terminals_only(tmp_path: Path) -> None:
    code = (
        "import sys\nfrom pathlib import Path\nfrom drl.api import Context, RunFacts\n"
        "from drl.builtin.config_loggers import ConsoleOptions\n"
        "from drl.builtin.logger_console import ConsoleLogger\n"
        "logger = ConsoleLogger(ConsoleOptions(), Context())\n"
        "logger.start(RunFacts(name='a', run_dir=Path('.'), recipe={}, first=0, total=1))\n"
        "assert not any(name.partition('.')[0] == 'rich' for name in sys.modules)\n"
    )
    result = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, capture_output=True, timeout=60, check=False
    )
    assert result.returncode == 0, result.stderr

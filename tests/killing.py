"""Runs that are ended at a chosen moment: by a signal from outside, or before a change on the disk.

A run in a process of its own spends seconds on imports. ``Zygote`` is a process that has imported
everything and forks one run per request, so that twenty kills cost twenty short runs. The forked
process runs the command line as a user would; what it does to the disk is watched by an audit hook,
the interpreter's own: the product knows nothing of it.
"""

from __future__ import annotations

import gc
import importlib
import json
import os
import re
import resource
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

SECONDS = 120
"""Patience with one run."""

WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT
CHANGES = ("os.rename", "os.mkdir", "os.remove", "os.rmdir", "os.truncate", "shutil.rmtree")
RANDOM = re.compile(r"(?<=[.-])(?:[0-9a-f]{12}|\d{2,7})(?=\.|$|/)")
"""What differs from run to run in the name of a temporary file: a token or a process id."""


@dataclass(slots=True)
class Watcher:
    """Audit hook: writes down each change below ``root``; kills the process before a wanted one.

    ``pattern`` is searched in the description of a change (``rename a -> b``), ``number`` counts
    matches from 1. The k-th change of a run is ``pattern=""`` and ``number=k``.
    """

    root: str
    log: int
    pattern: re.Pattern[str] | None
    number: int
    found: int = 0

    def __call__(self, event: str, arguments: tuple[Any, ...]) -> None:
        """Take an event of the interpreter; most are none of our business."""
        if event == "open":
            path, _, flags = arguments
            if not flags & WRITING:
                return
            paths = [path]
        elif event in CHANGES:
            paths = list(arguments[: 2 if event == "os.rename" else 1])
        else:
            return
        if not all(isinstance(path, str | os.PathLike) for path in paths):
            return
        names = [os.fspath(path) for path in paths]
        if str(names[-1]).startswith(self.root):
            self.change(f"{event.removeprefix('os.')} {' -> '.join(map(self.short, names))}")

    def short(self, name: str) -> str:
        """Return a path below the run directory, without its random part."""
        return RANDOM.sub("*", name.removeprefix(self.root))

    def change(self, description: str) -> None:
        """Note a change that is about to happen, or kill the process instead."""
        if self.pattern is not None and self.pattern.search(description):
            self.found += 1
            if self.found == self.number:
                os.kill(os.getpid(), signal.SIGKILL)
        os.write(self.log, f"{description}\n".encode())


@dataclass(slots=True)
class Child:
    """A run that the zygote has forked; it leads a process group of its own."""

    pid: int
    folder: Path
    answers: Any
    code: int | None = None
    seconds: float = 0.0
    """Processor time of the whole run, once it has ended."""

    @property
    def output(self) -> str:
        """Everything that the run has printed so far."""
        return (self.folder / "output.txt").read_text()

    @property
    def changes(self) -> list[str]:
        """What the run has done to its directory so far, in order."""
        return read_lines(self.folder / "changes.txt")

    def signal(self, number: int) -> None:
        """Send a signal to the run alone; one that has just ended does not mind."""
        with suppress(ProcessLookupError):
            os.kill(self.pid, number)

    def wait(self) -> int:
        """Wait for the end; return the exit code, minus the signal's number when one ended it."""
        if self.code is None:
            if not self.ended(SECONDS):
                self.signal(signal.SIGKILL)
                self._take()
                raise AssertionError(f"a run did not end in {SECONDS} s:\n{self.output}")
            self._take()
        assert self.code is not None
        return self.code

    def ended(self, seconds: float) -> bool:
        """Wait this long at most; True once the run has ended."""
        return self.code is not None or bool(select.select([self.answers], [], [], seconds)[0])

    def _take(self) -> None:
        answer = json.loads(self.answers.readline())
        self.code = os.waitstatus_to_exitcode(answer["status"])
        self.seconds = answer["seconds"]

    def used(self) -> float:
        """Return the processor time so far in seconds: unlike the clock, it knows no busy neighbours."""
        clock = (~self.pid << 3) | 2  # Linux: the clock of all threads of a process
        try:
            return time.clock_gettime(clock)
        except OSError:  # it has just ended
            return float("inf")

    def wait_until(self, condition: Callable[[], bool]) -> bool:
        """Wait until a condition holds; False when the run ended before."""
        deadline = time.monotonic() + SECONDS
        while not condition():
            if self.ended(0.001):
                return False
            assert time.monotonic() < deadline
        return not self.ended(0)


class Zygote:
    """A process with everything imported; gives one forked run at a time."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.runs = 0
        self.child: Child | None = None
        self.process = subprocess.Popen(
            [sys.executable, __file__],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=os.environ | {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "passive"},
            bufsize=0,
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.wait(SECONDS)

    def start(
        self,
        arguments: Sequence[str],
        run_dir: Path,
        *,
        before: str | None = None,
        number: int = 1,
        room: int | None = None,
    ) -> Child:
        """Fork a command line; with ``before`` it dies before the n-th change that matches it.

        ``room``: bytes that none of its files can grow beyond.
        """
        if self.child is not None and self.child.code is None:  # of a test that has failed
            self.child.signal(signal.SIGKILL)
            self.child.wait()
        self.runs += 1
        folder = self.folder / f"process-{self.runs}"
        folder.mkdir(parents=True)
        request = {
            "arguments": list(arguments),
            "folder": str(folder),
            "root": f"{run_dir}/",
            "before": before,
            "number": number,
            "room": room,
        }
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(json.dumps(request).encode() + b"\n")
        answer = self.process.stdout.readline()
        assert answer, f"the zygote has died with {self.process.wait(SECONDS)}"
        self.child = Child(json.loads(answer)["pid"], folder, self.process.stdout)
        return self.child


def serve() -> None:
    """Answer requests on standard input until it closes."""
    import_all(HEAVY)
    # the product's own prints must not end up among the answers
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    for line in sys.stdin:
        request = json.loads(line)
        assert len(os.listdir("/proc/self/task")) == 1, "a thread would be lost in the fork"
        pid = os.fork()
        if pid == 0:
            answers.close()
            run_command(request)
        answers.write(json.dumps({"pid": pid}) + "\n")
        _, status, usage = os.wait4(pid, 0)
        seconds = usage.ru_utime + usage.ru_stime
        answers.write(json.dumps({"status": status, "seconds": seconds}) + "\n")
        import_all(read_lines(Path(request["folder"]) / "modules.txt"))


def import_all(names: Sequence[str]) -> None:
    """Import modules, so that later forks find them loaded."""
    for name in names:
        importlib.import_module(name)
    gc.freeze()  # a fork would go through all of it again, and copy it


def read_lines(path: Path) -> list[str]:
    """Return the lines of a file; none when it is absent."""
    return path.read_text().splitlines() if path.is_file() else []


HEAVY = ("drl.assemble", "drl.launch", "drl_cli.run", "drl_family_sd3.tiny")
"""What takes seconds to import; the rest is learned from the first run that ends by itself."""


def run_command(request: dict[str, Any]) -> None:
    """Be the process of one run, in a process group of its own; never returns."""
    from drl_cli.main import execute

    os.setsid()
    folder = Path(request["folder"])
    output = os.open(folder / "output.txt", os.O_CREAT | os.O_WRONLY | os.O_APPEND)
    log = os.open(folder / "changes.txt", os.O_CREAT | os.O_WRONLY | os.O_APPEND)
    nothing = os.open(os.devnull, os.O_RDONLY)
    for source, target in ((nothing, 0), (output, 1), (output, 2)):
        os.dup2(source, target)
    if request["room"] is not None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (request["room"], resource.RLIM_INFINITY))
    pattern = None if request["before"] is None else re.compile(request["before"])
    sys.addaudithook(Watcher(request["root"], log, pattern, request["number"]))
    code = 70  # of a crash that execute did not turn into a message
    try:
        code = execute(request["arguments"])
        used = [name for name in sys.modules if name.startswith(("drl", "PIL."))]
        (folder / "modules.txt").write_text("\n".join(used))
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


if __name__ == "__main__":
    serve()

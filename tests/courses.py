"""One recipe run straight and run with interruptions: how to begin, go on, and compare the ends."""

from __future__ import annotations

import fcntl
import json
import random
import signal
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from e2e import final_state, metric_rows, same, set_words, summary_of, without_trust
from killing import Child, Zygote
from safetensors import safe_open

from drl.checkpoint import damage, latest
from drl.checkpoint.folders import TRACKER

SHORT = (
    "train.num_rollout=3",
    "train.num_steps_per_rollout=2",
    "checkpoint.save_interval=1",
    "checkpoint.keep_last=2",
    "eval.interval=2",
)
"""Two optimizer steps an iteration; a checkpoint after each, the first one is deleted after the third."""


@dataclass(slots=True)
class Course:
    """A recipe with its settings, and the run that nothing has interrupted."""

    zygote: Zygote
    recipe: Path
    sets: tuple[str, ...]
    straight: Path
    seconds: float = 0.0
    changes: tuple[str, ...] = ()

    @classmethod
    def run(cls, zygote: Zygote, recipe: Path, folder: Path, *sets: str) -> Course:
        """Run the recipe to its end."""
        course = cls(zygote, recipe, (*SHORT, *sets), folder / "straight")
        child = course.begin(course.straight)
        assert child.wait() == 0, child.output
        course.seconds, course.changes = child.seconds, tuple(child.changes)
        return course

    def begin(self, run_dir: Path, *, before: str | None = None, number: int = 1) -> Child:
        """Start the run, or go on with it where there is something to go on with."""
        words = ["run", str(self.recipe), "--run-dir", str(run_dir), *set_words(self.sets)]
        if run_dir.is_dir() and any(run_dir.iterdir()):
            words.append("--resume")
        return self.zygote.start(words, run_dir, before=before, number=number)

    def kill_at(self, run_dir: Path, share: float) -> Child:
        """Kill the run after this share of the straight one's processor time, if it lives so long."""
        child = self.begin(run_dir)
        return kill_when(child, lambda: child.used() >= share * self.seconds)

    def kill_before(self, run_dir: Path, change: str, number: int = 1) -> Child:
        """Kill the run just before the n-th matching change in its directory."""
        child = self.begin(run_dir, before=change, number=number)
        assert child.wait() == -signal.SIGKILL, f"no {change!r}:\n{child.output}"
        check_what_is_left(run_dir)
        return child

    def finish(self, run_dir: Path) -> Child:
        """Go on to the end, and see that it is that of the straight run."""
        child = self.begin(run_dir)
        assert child.wait() == 0, child.output
        self.check_end(run_dir)
        return child

    def check_end(self, run_dir: Path) -> None:
        """Compare everything that a run leaves behind, times apart."""
        assert same(final_state(run_dir), final_state(self.straight))
        assert run_state(run_dir) == run_state(self.straight)
        text = (run_dir / "metrics.jsonl").read_text()
        assert text.endswith("}\n")
        assert without_trust(metric_rows(run_dir)) == without_trust(metric_rows(self.straight))
        for name in ("adapter", "evaluations", "model"):
            assert contents(run_dir / name) == contents(self.straight / name), name
        for fact in ("heldout", "images_seen", "iterations", "seed", "status"):
            assert summary_of(run_dir)[fact] == summary_of(self.straight)[fact], fact
        assert "</html>" in (run_dir / "report.html").read_text()
        check_what_is_left(run_dir)
        assert listing(run_dir) == listing(self.straight)


def kill_when(child: Child, condition: Callable[[], bool]) -> Child:
    """Kill a run once a condition holds; see that what it leaves can be gone on with."""
    if child.wait_until(condition):
        child.signal(signal.SIGKILL)
    assert child.wait() in (0, -signal.SIGKILL), child.output
    return child


def check_what_is_left(run_dir: Path) -> None:
    """The directory is free, every checkpoint that can be seen is whole, the tracker names one."""
    lock = run_dir / "lock"
    if lock.exists():
        with lock.open("r+") as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    root = run_dir / "checkpoints"
    assert {folder.name: damage(folder) for folder in root.glob("iter_*") if damage(folder)} == {}
    if (root / TRACKER).exists():
        assert latest(root).is_dir()


def moments(seed: int, count: int) -> list[float]:
    """Return shares of a run, drawn evenly."""
    draw = random.Random(seed)
    return [round(draw.random(), 3) for _ in range(count)]


def run_state(run_dir: Path) -> dict[str, Any]:
    """Return the plain part of a run's last checkpoint, times and parity apart."""
    folder = latest(run_dir / "checkpoints")
    state = {file.name: json.loads(file.read_text()) for file in folder.glob("*.json")}
    row = state["run.json"]["row"]
    state["run.json"]["row"] = {
        k: v for k, v in row.items() if not k.startswith(("perf/", "trust/"))
    }
    del state["meta.json"]["time"]
    del state["manifest.json"]  # digests of the files that hold a time
    return state


def contents(folder: Path) -> dict[str, object]:
    """Return the files of a folder by name; of safetensors the tensors, whatever order they lie in."""
    return {path.relative_to(folder).as_posix(): content(path) for path in files(folder)}


def content(path: Path) -> object:
    """Return what can be compared: bytes, or metadata and the bytes of each tensor by name."""
    if path.suffix != ".safetensors":
        return path.read_bytes()
    with safe_open(path, framework="np") as file:
        return file.metadata(), {
            name: file.get_tensor(name).tobytes() for name in sorted(file.keys())
        }


def listing(run_dir: Path) -> list[str]:
    """Return the paths of all files; pictures of a rollout go with the process that made them."""
    paths = (path.relative_to(run_dir).as_posix() for path in files(run_dir))
    return sorted(path for path in paths if not path.startswith("samples/rollout-"))


def files(folder: Path) -> Iterator[Path]:
    """Yield the files below a folder."""
    return (path for path in folder.rglob("*") if path.is_file())

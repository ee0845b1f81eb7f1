"""What the console says about a run, as text: the same facts for the live view and plain lines."""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from drl.observe.performance import speed_words

RECENT = 20
"""Iterations whose median time makes the estimate, so that one slow one does not spoil it."""

PHASES = {
    "rollout": "perf/rollout_time",
    "reward": "perf/overlapped/reward_time",
    "train": "perf/train_time",
    "sync": "perf/update_weights_time",
}
BARS = "▁▂▃▄▅▆▇█"


@dataclass(slots=True)
class Phase:
    """What an iteration is doing: ``done`` of ``total`` pieces, since ``started`` on the clock."""

    name: str
    started: float
    done: int = 0
    total: int = 0


@dataclass(slots=True)
class Progress:
    """Where a run is. ``clock`` gives seconds; iterations are ``first`` to ``total - 1``."""

    first: int
    total: int
    clock: Callable[[], float]
    step: int = field(init=False)
    phase: Phase | None = None
    values: Mapping[str, float] = field(default_factory=dict)
    rewards: deque[float] = field(default_factory=lambda: deque(maxlen=60))
    _began: float | None = None
    _times: deque[float] = field(default_factory=lambda: deque(maxlen=RECENT))

    def __post_init__(self) -> None:
        self.step = self.first

    def enter(self, step: int, name: str, done: int, total: int) -> None:
        """Note the phase of iteration ``step``; its clock starts when its name changes."""
        now = self.clock()
        self.step = step
        if self._began is None:
            self._began = now
        if self.phase is None or self.phase.name != name:
            self.phase = Phase(name, now)
        self.phase.done, self.phase.total = done, total

    def finish(self, step: int, values: Mapping[str, float]) -> None:
        """Note the figures of an iteration that ended."""
        now = self.clock()
        spent = None if self._began is None else now - self._began
        if not self._times:
            # before the first iteration come start-up and an evaluation, which its own time leaves out
            spent = values.get("perf/step_time", spent)
            if spent is not None:
                spent = max(0.0, spent - values.get("perf/eval_time", 0.0))
        if spent is not None:
            self._times.append(spent)
        self._began = now
        self.step, self.phase, self.values = step + 1, None, dict(values)
        if REWARD in values:
            self.rewards.append(values[REWARD])

    def remaining_s(self) -> float | None:
        """Return the seconds that are left, from the median iteration; None before the first one."""
        if not self._times:
            return None
        each = statistics.median(self._times)
        spent = 0.0 if self._began is None else min(self.clock() - self._began, each)
        return max(0.0, (self.total - self.step) * each - spent)


REWARD = "rollout/reward/raw_mean"


def iteration_line(progress: Progress) -> str:
    """Return one line about the iteration that ended last."""
    values = progress.values
    facts = [f"iteration {progress.step}/{progress.total}", *learning(values), seconds(values)]
    facts += [*speed_words(values), *evaluations(values), estimate(progress)]
    return "  ".join(fact for fact in facts if fact)


def learning(values: Mapping[str, float]) -> list[str]:
    """Return reward, ratio and clip share, as far as they are known; the loss when no reward is."""
    facts = []
    if REWARD in values:
        spread = values.get("rollout/reward/raw_std")
        facts.append(f"reward {values[REWARD]:.3f}" + ("" if spread is None else f" ±{spread:.3f}"))
    elif "train/loss" in values:
        facts.append(f"loss {values['train/loss']:.4g}")
    if "train/ratio_mean" in values:
        facts.append(f"ratio {values['train/ratio_mean']:.4f}")
    if "train/clipfrac" in values:
        facts.append(f"clip {100 * values['train/clipfrac']:.1f}%")
    return facts


def seconds(values: Mapping[str, float]) -> str:
    """Return the time of each phase of an iteration."""
    known = ((name, values[key]) for name, key in PHASES.items() if key in values)
    return " ".join(f"{name} {value:.1f}s" for name, value in known)


def evaluations(values: Mapping[str, float]) -> list[str]:
    """Return the held-out rewards, by data set."""
    prefix = "eval/"
    return [
        f"{name} {value:.3f}" for name, value in sorted(values.items()) if name.startswith(prefix)
    ]


def estimate(progress: Progress) -> str:
    """Return the time that is left, or nothing when it is unknown or the run is at its end."""
    remaining = progress.remaining_s()
    if remaining is None or progress.step >= progress.total:
        return ""
    return f"ETA {duration(remaining)}"


def duration(value_s: float) -> str:
    """Return seconds as 12s, 4m12s or 1h03m."""
    whole = round(value_s)
    if whole < 60:
        return f"{whole}s"
    if whole < 3600:
        return f"{whole // 60}m{whole % 60:02d}s"
    return f"{whole // 3600}h{whole % 3600 // 60:02d}m"


def sparkline(values: Sequence[float]) -> str:
    """Return one bar per value, between the least and the largest of them."""
    if not values:
        return ""
    low, high = min(values), max(values)
    step = (high - low) / (len(BARS) - 1)
    return "".join(BARS[round((value - low) / step) if step > 0 else 0] for value in values)

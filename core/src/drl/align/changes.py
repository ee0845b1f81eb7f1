"""Causes by trial: the trainer's forward with one thing changed at a time, and what became of the difference."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from drl.align.measure import Batches, Replay, average, score, worst
from drl.types import EMPTY, Pair, Sample

if TYPE_CHECKING:
    from torch import Tensor

REMOVED = 0.1
"""A change that leaves at most this share of the difference is a cause; up to ``HALVED`` it is a part."""
HALVED = 0.5

ROUNDING = 1e-7
"""A difference up to here is the last bit of some log-probs; only what leaves nothing of it explains it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Scene:
    """What a change may look at.

    ``replay``, ``batches``: how the steps are scored as they are. ``samples``: by index. ``sigmas``
    ``(S + 1,)``, ``timesteps`` ``(S,)``: the trainer's own schedule, None where the family has none.
    ``engine_options``: of the engine, as plain values. ``compiled``: the trainer's blocks are.
    ``blocks``: class names of the blocks, by component.
    """

    replay: Replay
    batches: Batches
    samples: Mapping[int, Sample] = field(default_factory=dict)
    sigmas: Tensor | None = None
    timesteps: Tensor | None = None
    engine_options: Mapping[str, Any] = EMPTY
    compiled: bool = False
    blocks: Mapping[str, Sequence[str]] = EMPTY

    @property
    def pairs(self) -> list[Pair]:
        """The pairs with weight."""
        return [pair for batch in self.batches for pair in batch if pair.weight]

    def with_pairs(self, change: Callable[[Pair], Pair]) -> list[tuple[Pair, ...]]:
        """Return the micro-batches with every pair changed."""
        return [tuple(change(pair) for pair in batch) for batch in self.batches]


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """One thing that the trainer does otherwise, and what it means when the difference goes away with it.

    ``kept``: what is tried after it is tried on top of it: "never", "helps" (when it does) or "always".
    """

    name: str
    meaning: str
    replay: Replay
    batches: Batches
    kept: str = "never"


Difference = tuple[float, float]
"""Mean and largest difference of log-probs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """What a change left of the difference of log-probs.

    ``verdict``: "cause" (nothing or little is left), "part", "none", or "failed" or "untried", with
    the reason in ``meaning``. ``on_top_of``: the changes that were kept before it, and that it is measured against.
    """

    name: str
    meaning: str
    verdict: str
    mean: float = math.nan
    max: float = math.nan
    on_top_of: tuple[str, ...] = ()


Changes = Callable[[Scene], Iterable[Change | Finding]]
"""A kind of changes; a Finding among them says why something is not tried."""


def find_causes(scene: Scene, base: Difference, kinds: Sequence[Changes]) -> list[Finding]:
    """Try every change on a scene with a difference of ``base``. Nothing is left changed."""
    tried: list[Finding] = []
    kept: tuple[str, ...] = ()
    for kind in kinds:
        for change in kind(scene):
            if isinstance(change, Finding):
                tried.append(replace(change, on_top_of=kept))
                continue
            found = replace(try_change(change, base), on_top_of=kept)
            helped = found.verdict in {"cause", "part"}
            if change.kept == "helps" and helped:
                found = replace(found, verdict="cause")  # what is left has causes of its own
            tried.append(found)
            if found.verdict != "failed" and (
                change.kept == "always" or (change.kept == "helps" and helped)
            ):
                scene, base = replace(scene, replay=change.replay), (found.mean, found.max)
                kept = (*kept, change.name)
        if base[1] == 0.0:
            break
    return tried


def by_weight(findings: Iterable[Finding]) -> list[Finding]:
    """Return findings with the most telling ones first."""
    order = {"cause": 0, "part": 1, "none": 2, "failed": 3, "untried": 4}
    return sorted(findings, key=lambda one: (order[one.verdict], _rank(one.mean)))


def _rank(value: float) -> float:
    return math.inf if math.isnan(value) else value


def try_change(change: Change, base: Difference) -> Finding:
    """Score the steps with one change. A kernel that cannot run here is a finding too."""
    try:
        figures = score(change.replay, change.batches)
    except RuntimeError as error:  # torch has no such kernel for these tensors
        reason = str(error).strip().partition("\n")[0][:200]
        return Finding(name=change.name, meaning=f"cannot run here: {reason}", verdict="failed")
    mean, most = average(figures), worst(figures)
    return Finding(
        name=change.name,
        meaning=change.meaning,
        verdict=verdict(base, (mean, most)),
        mean=mean,
        max=most,
    )


def verdict(before: Difference, after: Difference) -> str:
    """Compare the difference before and after a change."""
    if any(math.isnan(value) for value in (*before, *after)):
        cured = any(map(math.isnan, before)) and not any(map(math.isnan, after))
        return "part" if cured else "none"
    if after[1] == 0.0:
        return "cause"
    if before[1] <= ROUNDING:
        return "none"
    share = max(after[0] / before[0], after[1] / before[1])
    if share <= REMOVED:
        return "cause"
    return "part" if share <= HALVED else "none"


def otherwise(scene: Scene, name: str, meaning: str, changed: Replay) -> Change:
    """Return a change of the forward, with the pairs as they are."""
    return Change(name=name, meaning=meaning, replay=changed, batches=scene.batches)


def with_pairs(scene: Scene, name: str, meaning: str, change: Callable[[Pair], Pair]) -> Change:
    """Return a change of the pairs, with the forward as it is."""
    return Change(name=name, meaning=meaning, replay=scene.replay, batches=scene.with_pairs(change))


def causes_among(findings: Iterable[Finding]) -> list[Finding]:
    """Return the findings that explain the difference, or else those that explain a part of it."""
    found = by_weight(findings)
    causes = [one for one in found if one.verdict == "cause"]
    return causes or [one for one in found if one.verdict == "part"]

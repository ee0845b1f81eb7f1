"""Which checkpoints stay: the newest, the best, and those that a verdict named."""

from __future__ import annotations

import json
import math
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from drl.checkpoint.folders import (
    TRACKER,
    checkpoints_in,
    folder_name,
    read_kept,
    remove_folder,
    tracked,
)
from drl.observe.files import write_json_atomic

SCORES = "scores.json"
"""Value of ``checkpoint.best_metric`` by folder name, for every evaluated iteration."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Retention:
    """``last`` newest and ``best`` by score stay; ``last`` None: nothing is ever deleted.

    ``metric``: figure of an evaluation, such as "eval/heldout". ``mode``: "max" or "min" is better.
    """

    last: int | None = None
    best: int = 0
    metric: str | None = None
    mode: str = "max"


def reasons(
    numbers: Collection[int],
    retention: Retention,
    *,
    scores: Mapping[int, float],
    kept: Iterable[int],
) -> dict[int, list[str]]:
    """Return why each checkpoint stays, newest first; one without a reason is deleted."""
    newest_first = sorted(numbers, reverse=True)
    why: dict[int, list[str]] = {number: [] for number in newest_first}
    count = len(newest_first) if retention.last is None else retention.last
    for number in newest_first[:count]:
        why[number].append("newest" if number == newest_first[0] else "recent")
    for place, number in enumerate(best_of(scores, retention), start=1):
        if number in why:
            why[number].append(f"best {place}")
    for number in kept:
        if number in why:
            why[number].append("kept")
    return why


def best_of(scores: Mapping[int, float], retention: Retention) -> list[int]:
    """Return the best-scored iterations, the best first; of equal ones the earlier is better."""
    sign = -1.0 if retention.mode == "max" else 1.0
    usable = {number: value for number, value in scores.items() if math.isfinite(value)}
    return sorted(usable, key=lambda number: (sign * usable[number], number))[: retention.best]


def read_scores(root: Path) -> dict[int, float]:
    """Return the scores by iterations done; an unreadable file counts as none."""
    try:
        table = json.loads((root / SCORES).read_text("utf-8"))
        return {int(name.removeprefix("iter_")): float(value) for name, value in table.items()}
    except (OSError, ValueError, TypeError, AttributeError):
        return {}


def write_score(root: Path, number: int, value: float) -> None:
    """Remember the score of one iteration."""
    scores = read_scores(root) | {number: value}
    root.mkdir(parents=True, exist_ok=True)
    write_json_atomic(root / SCORES, {folder_name(n): scores[n] for n in sorted(scores)})


def why_kept(root: Path, retention: Retention) -> dict[int, list[str]]:
    """Return why each checkpoint of a folder stays.

    Those beyond the tracker are of a run that went back: they stay until it reaches them again, and do not
    count as newest.
    """
    found = checkpoints_in(root)
    named = read_kept(root)
    last = tracked(root) if (root / TRACKER).is_file() else max(found, default=0)
    why = reasons(
        [number for number in found if number <= last],
        retention,
        scores=read_scores(root),
        kept=[number for number, folder in found.items() if folder.name in named],
    )
    return {number: ["beyond the tracker"] for number in found if number > last} | why


def prune(root: Path, retention: Retention) -> list[str]:
    """Delete what need not stay and return the names; call it after the tracker names the newest."""
    if retention.last is None:
        return []
    removed = []
    for number, why in why_kept(root, retention).items():
        if not why:
            remove_folder(root / folder_name(number))
            removed.append(folder_name(number))
    return removed

"""The checkpoints of a run as a table: what each is, whether it is whole, and why it stays."""

from __future__ import annotations

import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from drl.checkpoint.folders import (
    TRACKER,
    checkpoints_in,
    folder_name,
    read_kept,
    tracked,
)
from drl.checkpoint.load import checkpoints_of, is_checkpoints_folder
from drl.checkpoint.manifest import damage
from drl.checkpoint.meta import read_meta
from drl.checkpoint.retention import Retention, read_scores, why_kept
from drl.errors import CheckpointError

UNITS = ("B", "kB", "MB", "GB", "TB")


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One checkpoint. ``time``: UTC of its save. ``problem``: None when every byte is as it was written.

    ``why``: why it stays when the next one is written; empty for one that will be deleted.
    """

    name: str
    iterations: int
    size: int
    time: str | None
    problem: str | None
    score: float | None
    why: tuple[str, ...]
    reason: str | None
    is_tracked: bool


def list_checkpoints(path: Path) -> list[Row]:
    """Return the checkpoints of a run directory or a checkpoints folder, oldest first; reads all bytes."""
    if not path.is_dir():
        raise CheckpointError(f"there is no folder {path}; give a run directory")
    root = path if is_checkpoints_folder(path) else checkpoints_of(path)
    run_dir = root.parent if root == path else path
    scores, kept = read_scores(root), read_kept(root)
    why = why_kept(root, retention_in(run_dir / "recipe.toml"))
    named = tracked(root) if (root / TRACKER).is_file() else None
    rows = []
    for number, folder in checkpoints_in(root).items():
        problem = damage(folder)
        rows.append(
            Row(
                name=folder.name,
                iterations=number,
                size=sum(file.stat().st_size for file in folder.rglob("*") if file.is_file()),
                time=None if problem else read_meta(folder).get("time"),
                problem=problem,
                score=scores.get(number),
                why=tuple(why[number]),
                reason=kept.get(folder_name(number)),
                is_tracked=number == named,
            )
        )
    return rows


def retention_in(recipe: Path) -> Retention:
    """Return the retention of a run's recipe; without one everything stays."""
    if not recipe.is_file():
        return Retention()
    try:
        section: Any = tomllib.loads(recipe.read_text("utf-8")).get("checkpoint", {})
        return Retention(
            last=section.get("keep_last"),
            best=section.get("keep_best", 0),
            metric=section.get("best_metric"),
            mode=section.get("best_mode", "max"),
        )
    except (OSError, ValueError, AttributeError) as error:
        raise CheckpointError(f"{recipe} cannot be read: {error}") from error


def lines_of(rows: list[Row]) -> list[str]:
    """Return the rows as lines of a table for people."""
    head = ("checkpoint", "size", "saved (UTC)", "score", "state", "stays as")
    table = [head, *(cells(row) for row in rows)]
    widths = [max(len(line[column]) for line in table) for column in range(len(head) - 1)]
    return [
        "  ".join(
            [*(cell.ljust(width) for cell, width in zip(line, widths, strict=False)), line[-1]]
        )
        for line in table
    ]


def cells(row: Row) -> tuple[str, ...]:
    """Return one row as text."""
    why = ", ".join(row.why) or "deleted at the next save"
    if row.reason:
        why = why.replace("kept", f"kept: {row.reason}")
    return (
        row.name + (" *" if row.is_tracked else ""),
        bytes_text(row.size),
        (row.time or "").replace("T", " ").removesuffix("Z"),
        "" if row.score is None else f"{row.score:.4g}",
        "good" if row.problem is None else f"damaged: {row.problem}",
        why,
    )


def bytes_text(size: float) -> str:
    """Return a size with three digits."""
    for unit in UNITS:
        if size < 1000 or unit == UNITS[-1]:
            return f"{size:.3g} {unit}"
        size /= 1000
    raise AssertionError

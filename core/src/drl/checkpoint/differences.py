"""A resumed run and its recipe: what differs, what that means, and what is let through."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

MAY_CHANGE = (
    "run.",
    "logging.",
    "model.gradient_checkpointing",
    "model.checkpointed_share",
    "checkpoint.",
    "eval.",
    "train.num_rollout",
    "train.num_epoch",
    "train.start_rollout_id",
    "cluster.",
    "rollout.server_concurrency",
    "rollout.router_",
    "rollout.distributed_post",
    "rollout.parser_num_workers",
    "debug.save_",
    "debug.dump_details",
    "debug.engine_debug",
    "debug.ci.",
)
"""Options that a resumed run may have changed: they do not change what an iteration computes."""

CHANGES, HARMLESS = "changes what an iteration computes", "does not change an iteration"


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """One option: its value in the run's recipe, its value now, and whether an iteration depends on it."""

    key: str
    was: object
    now: object
    matters: bool


def differences(
    before: Mapping[str, Any], now: Mapping[str, Any], free: Sequence[str]
) -> list[Difference]:
    """Return what differs between two tables of dotted keys; ``free``: beginnings of harmless keys."""
    return [
        Difference(
            key=key,
            was=before.get(key),
            now=now.get(key),
            matters=not key.startswith((*MAY_CHANGE, *free)),
        )
        for key in sorted(before.keys() | now.keys())
        if before.get(key) != now.get(key)
    ]


def table(found: Sequence[Difference], allowed: Sequence[str]) -> list[str]:
    """Return the differences as lines of a table: key, was, is, meaning."""
    rows = [("option", "was", "is", "meaning")]
    for one in found:
        meaning = CHANGES if one.matters else HARMLESS
        if one.matters and one.key in allowed:
            meaning += ", allowed"
        rows.append((one.key, shown(one.was), shown(one.now), meaning))
    widths = [max(len(row[column]) for row in rows) for column in range(3)]
    return [
        "  ".join([*(cell.ljust(width) for cell, width in zip(row, widths, strict=False)), row[3]])
        for row in rows
    ]


def shown(value: object) -> str:
    """Return a value as a table shows it, shortened in its middle."""
    text = "unset" if value is None else repr(value)
    return text if len(text) <= 40 else f"{text[:20]} … {text[-17:]}"


def flat(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return nested tables as one table of dotted keys."""
    result: dict[str, Any] = {}
    for key, value in values.items():
        if isinstance(value, dict):
            result |= flat(value, f"{prefix}{key}.")
        else:
            result[f"{prefix}{key}"] = value
    return result

"""The facts of ``describe`` as lines for people."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

SHOWN_METADATA = 12
LONGEST = 120


def lines(facts: Mapping[str, Any]) -> Iterator[str]:
    """Yield the description for people."""
    yield f"{facts['path']}: {facts['title']}, {size_text(facts['bytes'])}"
    if facts.get("class"):
        yield f"  class      {facts['class']}"
    for name, one in facts.get("parts", {}).items():
        yield f"  {name:<20} {one['tensors']} tensors, {_counts(one['dtypes'])}, {size_text(one['bytes'])}"
    if "tensors" in facts:
        yield f"  tensors    {facts['tensors']}, {_counts(facts['dtypes'])}"
    if "merged" in facts:
        yield f"  merged     {facts['merged'].get('from')} into {facts['merged'].get('base')}"
    for name, one in facts.get("components", {}).items():
        yield from _component_lines(name, one)
    for note in facts.get("notes", ()):
        yield f"  note       {note}"
    told = list(facts.get("metadata", {}).items())
    for key, value in told[:SHOWN_METADATA]:
        yield f"  {key} = {value if len(value) <= LONGEST else value[: LONGEST - 3] + '...'}"
    if len(told) > SHOWN_METADATA:
        yield f"  and {len(told) - SHOWN_METADATA} more entries of metadata (--json shows all)"
    if "adapter" in facts:
        yield from lines(facts["adapter"])


def _component_lines(name: str, one: Mapping[str, Any]) -> Iterator[str]:
    yield f"  {name}: {one['modules']} modules"
    yield f"    rank     {_counts(one['ranks'])}"
    yield f"    alpha    {_counts(one['alphas'])}"
    yield f"    scale    {_counts(one['scales'])}"
    yield f"    dtype    {_counts(one['dtypes'])}"
    if one["other_tensors"]:
        yield f"    others   {one['other_tensors']} tensors that are no LoRA matrices"
    for target, count in one["targets"].items():
        yield f"    {count:5} x {target}"


def _counts(counts: Mapping[str, int]) -> str:
    if len(counts) == 1:
        return next(iter(counts))
    return ", ".join(f"{value} ({count})" for value, count in counts.items()) or "none"


def size_text(count: int) -> str:
    """Return a number of bytes for people."""
    for unit, size in (("GB", 10**9), ("MB", 10**6), ("kB", 10**3)):
        if count >= size:
            return f"{count / size:.1f} {unit}"
    return f"{count} bytes"

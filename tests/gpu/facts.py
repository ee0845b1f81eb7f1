"""What the GPU tests measured, for the table: one JSON file, named by ``DRL_GPU_FACTS``."""

from __future__ import annotations

import fcntl
import json
import os
from pathlib import Path
from typing import Any

from drl.observe.files import write_json_atomic

FACTS_VARIABLE = "DRL_GPU_FACTS"


def record(group: str, **values: Any) -> None:
    """Add figures to a group and show them; kept at once, so that a test that hangs costs its own only."""
    print(group, values)
    path = os.environ.get(FACTS_VARIABLE)
    if path is None:
        return
    with open(f"{path}.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # tests run in several processes
        facts = read(Path(path))
        facts.setdefault(group, {}).update(values)
        write_json_atomic(Path(path), facts)


def read(path: Path) -> dict[str, dict[str, Any]]:
    """Return what was recorded so far."""
    if not path.is_file() or not path.read_text().strip():
        return {}
    facts: dict[str, dict[str, Any]] = json.loads(path.read_text())
    return facts

"""Print what ``DRL_GPU_FACTS`` holds as a short table: ``python tests/gpu/table.py FACTS.json``."""

from __future__ import annotations

import json
import platform
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

Facts = dict[str, dict[str, Any]]
WIDTH = 34


def versions() -> dict[str, Any]:
    """Return what this was measured on."""
    import torch

    found: dict[str, Any] = {
        name: _version(name) for name in ("diffusers", "transformers", "peft", "drl-core")
    }
    found |= {"python": platform.python_version(), "torch": torch.__version__}
    found["cuda"] = torch.version.cuda or "none"
    gpu = torch.cuda.is_available()
    found["gpu"] = torch.cuda.get_device_name(0) if gpu else "none: no CUDA device is visible"
    return found


def _version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return "absent"


def lines_of(facts: Facts) -> list[str]:
    """Return one line per figure."""
    lines = []
    for group, values in facts.items():
        if all(isinstance(value, (int, float, str)) for value in values.values()):
            text = "  ".join(f"{name} {shown(value)}" for name, value in values.items())
            lines.append(f"{group:<{WIDTH}} {text}")
            continue
        for name, value in values.items():
            lines += _member(f"{group}: {name}", value)
    return lines


def _member(label: str, value: Any) -> list[str]:
    if value in ({}, [], ""):
        return []
    if isinstance(value, dict):
        value = "  ".join(f"{name} {shown(entry)}" for name, entry in value.items())
    elif isinstance(value, list):
        value = "; ".join(map(str, value))
    return [f"{label:<{WIDTH}} {shown(value)}"]


def shown(value: Any) -> str:
    """Return a figure with three digits, anything else as it is."""
    if isinstance(value, float):
        return f"{value:.3g}" if value < 1e4 else f"{value:.0f}"
    return str(value)


def main(path: Path) -> int:
    """Complete the file by versions, print it; return 1 when a test failed or none ran."""
    text = path.read_text() if path.is_file() else ""
    facts: Facts = {"machine": versions()} | (json.loads(text) if text.strip() else {})
    path.write_text(json.dumps(facts, indent=2) + "\n")
    print("=" * 100)
    print("\n".join(lines_of(facts)))
    counts = [facts.get(group, {}) for group in ("tests", "bench")]
    bad = sum(count.get("failed", 0) + count.get("error", 0) for count in counts)
    return 1 if bad or not all(counts) else 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))

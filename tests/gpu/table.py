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
FIRST = ("machine", "tests", "bench")


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
    """Return a line of plain figures per group, then its lists and tables, each with a line of its own."""
    first = [group for group in FIRST if group in facts]
    lines = []
    for group in [*first, *(group for group in facts if group not in first)]:
        plain = {k: v for k, v in facts[group].items() if not isinstance(v, (dict, list))}
        if plain:
            lines.append(f"{group:<{WIDTH}} {joined(plain)}")
        for name, value in facts[group].items():
            if isinstance(value, (dict, list)) and value:
                lines.append(f"{f'{group}: {name}':<{WIDTH}} {joined(value)}")
    return lines


def joined(values: dict[str, Any] | list[Any]) -> str:
    """Return names and figures in one line."""
    if isinstance(values, list):
        return "; ".join(map(str, values))
    return "   ".join(f"{name} {shown(value)}" for name, value in values.items() if value != "")


def shown(value: Any) -> str:
    """Return a figure with three digits, anything else as it is."""
    if isinstance(value, float):
        return f"{value:.3g}" if value < 1e4 else f"{value:.0f}"
    return str(value)


def main(path: Path) -> int:
    """Complete the file by versions, print it; return 1 when a test failed."""
    text = path.read_text() if path.is_file() else ""
    facts: Facts = {"machine": versions()} | (json.loads(text) if text.strip() else {})
    path.write_text(json.dumps(facts, indent=2) + "\n")
    print("=" * 100)
    print("\n".join(lines_of(facts)))
    counts = [facts.get(group, {}) for group in ("tests", "bench")]
    bad = sum(count.get("failed", 0) + count.get("error", 0) for count in counts)
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))

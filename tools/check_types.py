#!/usr/bin/env python3
"""Type-check every member and the tools with mypy, in one run.

Each member's ``src`` is a root of its own, so mypy must be told all of them: editable installs are
found by the interpreter, not by a type checker.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def source_roots() -> list[Path]:
    """Return the ``src`` folder of every member."""
    manifests = [ROOT / "core" / "pyproject.toml", ROOT / "cli" / "pyproject.toml"]
    manifests += sorted(ROOT.glob("plugins/*/*/pyproject.toml"))
    return [manifest.parent / "src" for manifest in manifests]


def main() -> int:
    """Run mypy; return its exit code."""
    roots = source_roots()
    environment = os.environ | {"MYPYPATH": os.pathsep.join(map(str, [*roots, ROOT / "tools"]))}
    command = [sys.executable, "-m", "mypy", *map(str, [*roots, ROOT / "tools"])]
    return subprocess.run(command, cwd=ROOT, env=environment, check=False).returncode


if __name__ == "__main__":
    sys.exit(main())

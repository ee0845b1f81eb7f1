#!/usr/bin/env python3
"""Give every member the same new version, and every pin between members with it.

python tools/bump_version.py 0.2.0
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]

VERSION = re.compile(r'^version = "[^"]*"$', re.MULTILINE)
PIN = re.compile(r'"(drl-[a-z0-9-]+)==[^"]*"')
DUNDER = re.compile(r'^__version__ = "[^"]*"$', re.MULTILINE)


def manifests(root: Path) -> list[Path]:
    """Return the pyproject.toml of the workspace and of every member."""
    own = [root / part / "pyproject.toml" for part in (".", "core", "cli")]
    return [*own, *sorted(root.glob("plugins/*/*/pyproject.toml"))]


def bumped(manifest: str, version: str) -> str:
    """Return a manifest with the new version and the new pins; ValueError unless it has one version."""
    text, count = VERSION.subn(f'version = "{version}"', manifest)
    if count != 1:
        raise ValueError(f'expected one line  version = "…", found {count}')
    return PIN.sub(rf'"\1=={version}"', text)


def bump(root: Path, version: str) -> list[Path]:
    """Rewrite all files; nothing is written when one of them is not as expected."""
    changed: dict[Path, str] = {}
    for path in manifests(root):
        try:
            changed[path] = bumped(path.read_text("utf-8"), version)
        except ValueError as error:
            raise ValueError(f"{path.relative_to(root)}: {error}") from None
    package = root / "core" / "src" / "drl" / "__init__.py"
    changed[package] = DUNDER.sub(f'__version__ = "{version}"', package.read_text("utf-8"))
    for path, text in changed.items():
        path.write_text(text, "utf-8")
    return list(changed)


def main(arguments: list[str]) -> int:
    """Bump this repository; return the exit code."""
    if len(arguments) != 1 or not re.fullmatch(r"\d+\.\d+\.\d+", arguments[0]):
        print("usage: bump_version.py MAJOR.MINOR.PATCH", file=sys.stderr)
        return 2
    for path in bump(ROOT, arguments[0]):
        print(path.relative_to(ROOT))
    print("now install the members again:  make setup")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

"""Which modules import something heavy: exact, where a stop-watch would be flaky."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence

HEAVY = (
    "PIL",
    "diffusers",
    "numpy",
    "onnxruntime",
    "peft",
    "ray",
    "sglang",
    "torch",
    "torchvision",
    "transformers",
)
"""Top-level packages that no ``plugin.py`` and no ``config.py`` may import."""

_PROGRAM = """
import importlib, json, sys
names, banned = json.loads(sys.argv[1])
sys.modules.update(dict.fromkeys(banned))  # an import of None raises ImportError
failed = {}
for name in names:
    try:
        importlib.import_module(name)
    except Exception as error:
        failed[name] = f"{type(error).__name__}: {error}"
print(json.dumps(failed))
"""


def import_failures(modules: Sequence[str], banned: Sequence[str] = HEAVY) -> dict[str, str]:
    """Import modules in one fresh process without the banned packages; return the errors by module."""
    arguments = json.dumps([list(modules), list(banned)])
    done = subprocess.run(
        [sys.executable, "-c", _PROGRAM, arguments], capture_output=True, text=True, check=True
    )
    failed: dict[str, str] = json.loads(done.stdout.splitlines()[-1])
    return failed

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
from importlib.metadata import version

from drl.observe.versions import versions


def test_versions_name_python_platform_and_packages() -> None:
    found = versions([("drl-reward-mine", "9.9")], [{"kind": "reward", "name": "mine"}])
    assert found["python"] == platform.python_version()
    assert found["packages"]["torch"] == version("torch")
    assert found["packages"]["drl-core"] == version("drl-core")
    assert found["packages"]["drl-reward-mine"] == "9.9"
    assert list(found["packages"]) == sorted(found["packages"])
    assert found["components"] == [{"kind": "reward", "name": "mine"}]


def test_versions_hold_no_host_name_and_no_path() -> None:
    text = json.dumps(versions())
    assert "/" not in text
    assert os.sep not in text
    assert platform.release() not in text
    name = platform.node()
    assert not name or f'"{name}' not in text


def test_observing_a_run_imports_no_torch() -> None:
    code = (
        "import sys\n"
        "from drl.observe import directory, files, metrics, pictures, report, summary, timing, versions\n"
        "versions.versions()\n"
        "print('torch' in sys.modules)\n"
    )
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout == "False\n"

"""The code in the guides is the code that the tools write and that the tests run."""

from __future__ import annotations

import re
import subprocess
import sys

import pytest
from conftest import ROOT

GUIDE = ROOT / "docs" / "a-loss-in-60-lines.md"
BLOCK = re.compile(r"^`(src/[\w/]+\.py)`:\n\n```python\n(.*?)```", re.MULTILINE | re.DOTALL)


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    """The plugin that the guide tells the reader to make."""
    folder = tmp_path_factory.mktemp("guide") / "quadratic-loss"
    command = [sys.executable, str(ROOT / "tools" / "new_plugin.py"), "loss", "quadratic"]
    subprocess.run([*command, str(folder)], check=True, capture_output=True)
    return folder


def blocks() -> dict[str, str]:
    return dict(BLOCK.findall(GUIDE.read_text()))


@pytest.mark.parametrize("file", ["loss.py", "config.py", "plugin.py"])
def test_the_loss_guide_shows_what_the_tool_writes(written, file):
    name = f"src/drl_loss_quadratic/{file}"
    assert blocks()[name] == (written / name).read_text()


def test_the_loss_takes_at_most_60_lines_of_code():
    lines = blocks()["src/drl_loss_quadratic/loss.py"].splitlines()
    assert sum(bool(line.strip()) for line in lines) <= 60

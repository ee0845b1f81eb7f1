"""The shell scripts for a GPU machine: what they say and return when a part, a bundle or a file is missing."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
SCRIPTS = ("gpu_bench.sh", "gpu_bundle.sh", "gpu_check.sh", "gpu_install.sh")
NINE_MINUTES = 540


def call(script: str, bundle: Path, **settings: str) -> subprocess.CompletedProcess[str]:
    """Run a script on a bundle with this interpreter."""
    return subprocess.run(
        ["bash", str(ROOT / "tools" / script), str(bundle)],
        capture_output=True,
        text=True,
        check=False,
        env=os.environ | {"PYTHON": sys.executable} | settings,
    )


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A bundle with one wheel of one empty module."""
    folder = tmp_path_factory.mktemp("bundle")
    (folder / "wheels").mkdir()
    info = "acme_nothing-1.0.dist-info"
    files = {
        "acme_nothing.py": "",
        f"{info}/METADATA": "Metadata-Version: 2.1\nName: acme-nothing\nVersion: 1.0\n",
        f"{info}/WHEEL": "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    record = "".join(f"{name},,\n" for name in [*files, f"{info}/RECORD"])
    with zipfile.ZipFile(folder / "wheels" / "acme_nothing-1.0-py3-none-any.whl", "w") as wheel:
        for name, text in (*files.items(), (f"{info}/RECORD", record)):
            wheel.writestr(name, text)
    return folder


@pytest.mark.parametrize("script", SCRIPTS)
def test_the_script_is_valid_bash(script: str) -> None:
    checked = subprocess.run(["bash", "-n", str(ROOT / "tools" / script)], check=False)
    assert checked.returncode == 0


def test_a_check_without_recordings_goes_on_and_names_an_unknown_part(
    bundle: Path, tmp_path: Path
) -> None:
    finished = call("gpu_check.sh", bundle, PARTS="recordings everything", OUT=str(tmp_path))
    assert finished.returncode == 1
    assert "installed 1 wheels" in finished.stdout
    assert f"recordings: none in {bundle}, left out" in finished.stdout
    assert "everything is none of recordings, tests, bench" in finished.stdout
    assert "machine" in json.loads((tmp_path / "gpu_check.json").read_text())


def test_benchmarks_name_an_unknown_part_and_keep_a_log(bundle: Path, tmp_path: Path) -> None:
    finished = call("gpu_bench.sh", bundle, PARTS="no_such_benchmark", OUT=str(tmp_path))
    assert finished.returncode == 1
    assert "there is no benchmarks/no_such_benchmark.py" in finished.stdout
    assert (tmp_path / "gpu_bench.log").read_text() == ""


@pytest.mark.parametrize("script", ["gpu_check.sh", "gpu_bench.sh"])
def test_a_bundle_without_wheels_ends_at_once(script: str, tmp_path: Path) -> None:
    finished = call(script, tmp_path, OUT=str(tmp_path))
    assert finished.returncode == 1
    assert "installed" not in finished.stdout
    assert "wheels" in finished.stderr


def limits(script: str) -> dict[str, int]:
    """Return the script's settings in seconds, as it sets them by itself."""
    text = (ROOT / "tools" / script).read_text()
    found = re.findall(r"\$\{([A-Z_]+_S):[-=](\d+)\}", text)
    return {name: int(seconds) for name, seconds in found}


def test_a_check_takes_less_than_nine_minutes() -> None:
    found = limits("gpu_check.sh")
    assert found.keys() == {"RECORDINGS_S", "TESTS_S", "BENCH_S"}
    assert 2 * found["RECORDINGS_S"] + found["TESTS_S"] + found["BENCH_S"] <= NINE_MINUTES


def test_the_benchmarks_take_less_than_nine_minutes() -> None:
    found = limits("gpu_bench.sh")
    names = {f"{path.stem.upper()}_S" for path in (ROOT / "benchmarks").glob("*.py")}
    assert found.pop("TOTAL_S") <= NINE_MINUTES
    assert found.keys() <= names
    assert len(found) == 8


def test_a_benchmark_that_comes_too_late_is_stopped(bundle: Path, tmp_path: Path) -> None:
    settings = {"PARTS": "adapter_load", "TOTAL_S": "0", "ARGUMENTS": "--size small --device cpu"}
    finished = call("gpu_bench.sh", bundle, OUT=str(tmp_path), **settings)
    assert finished.returncode == 1
    assert "adapter_load: exit code 124" in finished.stdout

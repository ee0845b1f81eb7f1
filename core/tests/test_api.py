"""The public interface: light to import, and the same as its stored listing."""

from __future__ import annotations

import inspect
import subprocess
import sys
from importlib.metadata import version

import drl
from drl import api
from drl.kinds import FUNCTION, KINDS
from drl.testing.imports import import_failures


def test_the_version_is_that_of_the_distribution() -> None:
    assert drl.__version__ == version("drl-core")


def test_everything_in_all_is_there_once() -> None:
    assert len(api.__all__) == len(set(api.__all__))
    assert set(api.__all__) <= set(vars(api))


def test_the_interface_of_every_kind_is_in_the_api() -> None:
    for kind in KINDS:
        if kind.name == FUNCTION:  # nobody derives from the Protocol of a slot
            continue
        name = kind.interface.partition(":")[2]
        assert name in api.__all__
        assert inspect.isabstract(vars(api)[name])


def test_every_public_class_of_the_interfaces_is_documented() -> None:
    for name in api.__all__:
        value = vars(api)[name]
        if inspect.isclass(value):
            assert (value.__doc__ or "").strip(), name


def test_the_api_imports_the_standard_library_and_pluggy_only() -> None:
    heavy = ["pydantic", "torch", "numpy", "click", "rich", "rapidfuzz", "safetensors"]
    assert import_failures(["drl", "drl.api", "drl.plugins", "drl.catalog"], banned=heavy) == {}


def test_option_tables_need_pydantic_and_nothing_else() -> None:
    assert import_failures(["drl.options"]) == {}


def test_an_import_that_is_banned_is_reported() -> None:
    assert "torch" in import_failures(["drl.mathematics.packing", "torch.nn"])["torch.nn"]


def test_importing_drl_runs_no_plugin() -> None:
    program = "import sys, drl, drl.api; print([m for m in sys.modules if m.startswith('drl_')])"
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "[]"

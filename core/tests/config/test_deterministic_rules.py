"""Deterministic training before anything is loaded: attention kernels by name, variables of the environment."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest

from drl.config.determinism import (
    VARIABLES,
    defeated,
    deterministic_variables,
    flash_entry,
)

Load = Callable[..., Any]
Texts = Callable[..., dict[str, str]]

ON = {"train.deterministic": True}

KNOWN = (
    None,
    "native",
    "_native_cudnn",
    "_native_efficient",
    "_native_flash",
    "_native_math",
    "Native",
    "_NATIVE_MATH",
    "math",
    "flash",
    "Flash",
    "flash_varlen",
    "_flash_3",
)
REFUSED = (
    "flash_hub",
    "flash_varlen_hub",
    "flash_4_hub",
    "_flash_3_hub",
    "_flash_3_varlen_hub",
    "_flash_varlen_3",
    "sage",
    "SAGE_varlen",
    "_sage_qk_int8_pv_fp8_cuda",
    "xformers",
    "flex",
    "aiter",
    "aiter_fa2_hub",
    "something_new",
)


@pytest.fixture(autouse=True)
def bare(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (*VARIABLES, "DIFFUSERS_ATTN_BACKEND"):
        monkeypatch.delenv(name, raising=False)


@pytest.mark.parametrize("name", KNOWN)
def test_kernels_that_can_be_deterministic_by_name(load: Load, name: str | None) -> None:
    recipe = load({**ON, "train.attention_backend": name})
    assert recipe.train.deterministic
    assert not [problem for problem in recipe.warnings if "attention" in problem.path]


@pytest.mark.parametrize("name", REFUSED)
def test_kernels_that_cannot_are_refused_with_those_that_can(problems: Texts, name: str) -> None:
    found = problems({**ON, "train.attention_backend": name})
    text = found["train.attention_backend"]
    assert repr(name) in text
    assert "flash, flash_varlen, _flash_3" in text
    assert "'native' or 'math'" in text


@pytest.mark.parametrize("name", REFUSED[:7])
def test_without_the_mode_any_name_passes_this_check(load: Load, name: str) -> None:
    assert load({"train.attention_backend": name}).train.attention_backend == name


def test_each_flash_kernel_has_the_function_that_diffusers_calls() -> None:
    assert flash_entry("FLASH") == "flash_attn_func"
    assert flash_entry("flash_varlen") == "flash_attn_varlen_func"
    assert flash_entry("_flash_3") == "flash_attn_3_func"
    assert flash_entry("native") is None
    assert flash_entry(None) is None


def test_only_variables_that_nobody_gave_are_set() -> None:
    assert deterministic_variables({}) == {
        "NCCL_DETERMINISTIC": "1",
        "CUBLAS_WORKSPACE_CONFIG": ":4096:8",
        "TORCHINDUCTOR_DETERMINISTIC": "1",
    }
    given = {"CUBLAS_WORKSPACE_CONFIG": ":16:8", "OTHER": "x"}
    assert set(deterministic_variables(given)) == set(VARIABLES) - set(given)


def test_values_that_leave_no_room_for_chance_are_kept(load: Load) -> None:
    env = {"CUBLAS_WORKSPACE_CONFIG": ":16:8", "NCCL_DETERMINISTIC": "1"}
    assert defeated(env) == {}
    assert load({**ON, "train.env": env}).train.env == env


@pytest.mark.parametrize(
    ("name", "value", "right"),
    [
        ("CUBLAS_WORKSPACE_CONFIG", ":4096:2:16:8", ":4096:8 or :16:8"),
        ("CUBLAS_WORKSPACE_CONFIG", "", ":4096:8 or :16:8"),
        ("NCCL_DETERMINISTIC", "0", "1, or the variable unset"),
        ("TORCHINDUCTOR_DETERMINISTIC", "0", "1, or the variable unset"),
        ("DIFFUSERS_ATTN_BACKEND", "sage", "flash_varlen"),
    ],
)
def test_values_that_defeat_it_are_errors_wherever_they_are_given(
    problems: Texts,
    load: Load,
    monkeypatch: pytest.MonkeyPatch,
    name: str,
    value: str,
    right: str,
) -> None:
    given = problems({**ON, "train.env": {name: value}})["train.env"]
    assert given.startswith(f"{name} = {value!r}")
    assert right in given
    assert load({"train.env": {name: value}}).train.env == {name: value}
    monkeypatch.setenv(name, value)
    exported = problems(ON)["train.deterministic"]
    assert exported.startswith(f"the environment has {name} = {value!r}")
    assert right in exported
    assert not load().train.deterministic


def test_the_recipe_wins_over_the_shell(load: Load, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NCCL_DETERMINISTIC", "0")
    monkeypatch.setenv("DIFFUSERS_ATTN_BACKEND", "sage")
    recipe = load(
        {
            **ON,
            "train.env": {"NCCL_DETERMINISTIC": "1"},
            "train.attention_backend": "_native_math",
        }
    )
    assert recipe.train.env == {"NCCL_DETERMINISTIC": "1"}


def test_the_check_needs_no_torch() -> None:
    code = "import drl.config.rules, sys; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0

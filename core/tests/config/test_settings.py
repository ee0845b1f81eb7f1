"""``--set``: TOML values, plain text when they are none, and paths like keys of the file."""

from __future__ import annotations

import math
import tomllib
from collections.abc import Callable
from typing import Any

import pytest
import tomli_w
from hypothesis import given, settings
from hypothesis import strategies as st

from drl.config.settings import parse_setting, parse_value, set_layers

NAMES = st.from_regex(r"[A-Za-z0-9_-]{1,8}", fullmatch=True)
PATHS = st.lists(NAMES, min_size=2, max_size=4).map(".".join)
TEXTS = st.text(st.characters(exclude_categories=["Cs"]))
SCALARS = st.booleans() | st.integers() | st.floats() | TEXTS
VALUES = st.recursive(SCALARS, lambda inner: st.lists(inner, max_size=3), max_leaves=6)


@pytest.mark.parametrize(
    ("setting", "path", "value"),
    [
        ("sde.num_steps=4", "sde.num_steps", 4),
        ("optimizer.lr = 1e-4", "optimizer.lr", 1e-4),
        ('logging.loggers=["jsonl"]', "logging.loggers", ["jsonl"]),
        ("model.family=sd3", "model.family", "sd3"),
        ('run.name="4"', "run.name", "4"),
        ("trust.parity=false", "trust.parity", False),
        ("trust.parity=False", "trust.parity", "False"),
        ("run.name=a=b", "run.name", "a=b"),
        ("run.name=", "run.name", ""),
        ("run.name=2026-01-02", "run.name", "2026-01-02"),
        ("run.name=10:30:00", "run.name", "10:30:00"),
        ("run.name=# x", "run.name", "# x"),
        ("model.checkpoint=owner/name", "model.checkpoint", "owner/name"),
        ("reward.terms=[{name='ocr'}]", "reward.terms", [{"name": "ocr"}]),
    ],
)
def test_the_right_side_is_a_value_or_plain_text(setting: str, path: str, value: Any) -> None:
    parsed = parse_setting(setting)
    assert parsed == (path, value)
    assert type(parsed[1]) is type(value)


@pytest.mark.parametrize("setting", ["", "=", "a=1", "a.b", ".a=1", "a..b=1", "a b.c=1", "a.b.=1"])
def test_what_is_no_path_is_refused(setting: str) -> None:
    with pytest.raises(ValueError, match=r"write it as section\.option=value"):
        parse_setting(setting)


def test_a_line_break_cannot_smuggle_in_a_second_key() -> None:
    assert parse_value("1\nother = 2") == "1\nother = 2"


def test_all_wrong_settings_are_reported() -> None:
    layers, problems = set_layers(["a", "b.c=1", "d"])
    assert [problem.path for problem in problems] == ["--set", "--set"]
    assert [layer.values for layer in layers] == [{"b": {"c": 1}}]


def test_a_setting_through_a_scalar_makes_a_table(
    problems: Callable[..., dict[str, str]],
) -> None:
    assert problems(sets=["train.seed.x=1"]) == {
        "train.seed": "must be a whole number, got a table   (--set)"
    }


@given(path=PATHS, value=VALUES)
@settings(max_examples=60, deadline=None)
def test_a_value_written_as_toml_comes_back(path: str, value: Any) -> None:
    text = tomli_w.dumps({"value": value}).partition("=")[2].strip()
    found_path, found = parse_setting(f"{path}={text}")
    assert found_path == path
    assert _same(found, value)


def _same(first: Any, second: Any) -> bool:
    if isinstance(first, list):
        return len(first) == len(second) and all(map(_same, first, second))
    if isinstance(first, float) and math.isnan(first):
        return math.isnan(second)
    return type(first) is type(second) and bool(first == second)


@given(text=TEXTS)
@settings(max_examples=150, deadline=None)
def test_any_text_is_a_value_or_itself(text: str) -> None:
    value = parse_value(text)
    try:
        parsed = tomllib.loads(f"value = {text}")
    except (ValueError, RecursionError):
        assert value == text
        return
    if set(parsed) != {"value"}:
        assert value == text


@given(setting=st.text())
@settings(max_examples=150, deadline=None)
def test_any_setting_is_parsed_or_refused(setting: str) -> None:
    layers, problems = set_layers([setting])
    assert len(layers) + len(problems) == 1

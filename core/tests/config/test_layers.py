"""Merging of layers: who gave a leaf, what an upper layer takes, and how the pieces are described."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from drl.config.describe import Described, described
from drl.config.layers import Layer, Source, Tree, leaves, nested
from drl.config.places import is_file, is_folder
from drl.options import Field, Options

KEYS = st.sampled_from("abc")
TABLES = st.dictionaries(
    KEYS,
    st.recursive(st.integers(0, 9), lambda t: st.dictionaries(KEYS, t, min_size=1)),
    max_size=3,
)


def layer(
    values: dict[str, Any], origin: str = "one", lines: dict[str, int] | None = None
) -> Layer:
    return Layer(source=Source.RECIPE, origin=origin, values=values, base=Path(), lines=lines or {})


def merged(*tables: dict[str, Any]) -> Tree:
    tree = Tree()
    for number, values in enumerate(tables):
        tree.add(layer(values, str(number)))
    return tree


def owners(tree: Tree) -> dict[str, str]:
    return {path: owner.origin for path, owner in tree.owners.items()}


def test_tables_are_merged_and_lists_replaced() -> None:
    tree = merged({"a": {"x": 1, "y": [1, 2]}}, {"a": {"y": [3]}, "b": {"z": 1}})
    assert tree.values == {"a": {"x": 1, "y": [3]}, "b": {"z": 1}}
    assert owners(tree) == {"a.x": "0", "a.y": "1", "b.z": "1"}


def test_a_scalar_replaces_a_table_and_the_other_way_round() -> None:
    tree = merged({"a": {"x": 1}}, {"a": 2})
    assert (tree.values, owners(tree)) == ({"a": 2}, {"a": "1"})
    tree = merged({"a": 2}, {"a": {"x": 1}})
    assert (tree.values, owners(tree)) == ({"a": {"x": 1}}, {"a.x": "1"})


def test_an_empty_table_adds_nothing_to_a_filled_one() -> None:
    tree = merged({"a": {"x": 1}}, {"a": {}})
    assert (tree.values, owners(tree)) == ({"a": {"x": 1}}, {"a.x": "0"})


def test_null_takes_back_a_leaf_and_a_table() -> None:
    tree = merged({"a": {"x": 1, "y": 2}, "b": {"z": 3}}, {"a": {"x": None}, "b": None})
    assert (tree.values, owners(tree)) == ({"a": {"y": 2}}, {"a.y": "0"})


def test_adding_a_layer_returns_what_it_took() -> None:
    tree = merged({"a": {"x": 1, "y": 2}})
    assert tree.add(layer({"a": {"x": 5, "z": 6}})) == ["a.x"]
    assert sorted(tree.add(layer({"a": 1}))) == ["a.x", "a.y", "a.z"]


def test_merging_leaves_the_layers_alone() -> None:
    below = {"a": {"x": 1}}
    merged(below, {"a": {"x": 2, "y": 3}})
    assert below == {"a": {"x": 1}}


@given(tables=st.lists(TABLES, max_size=4))
@settings(max_examples=100, deadline=None)
def test_every_leaf_has_the_owner_that_gave_its_value(tables: list[dict[str, Any]]) -> None:
    tree = merged(*tables)
    found = {path: value for path, value in leaves(tree.values) if value != {}}
    assert {path for path in tree.owners if path in found} == set(found)
    for path, value in found.items():
        given_by = int(tree.owners[path].origin)
        assert dict(leaves(tables[given_by]))[path] == value


@given(table=TABLES)
@settings(max_examples=50, deadline=None)
def test_leaves_and_nested_are_inverse(table: dict[str, Any]) -> None:
    assert nested(leaves(table)) == table


def test_the_owner_of_a_table_is_found_and_that_of_an_entry_in_a_list() -> None:
    tree = merged({"a": {"x": 1}, "rows": [{"n": 1}]})
    for path in ("a", "a.x", "rows.0.n", "rows"):
        owner = tree.owner(path)
        assert owner is not None
        assert owner.origin == "0"
    assert tree.owner("b") is None


def test_the_line_of_an_option_is_that_of_the_nearest_table() -> None:
    lines = layer({}, lines={"a": 1, "a.x": 3})
    assert [lines.line(path) for path in ("a.x", "a.y", "a", "b.z", "")] == [3, 1, 1, None, None]


class Row(Options):
    """A row."""

    name: str = Field(description="Name.")


class Sample(Options):
    """Every kind of option."""

    number: float = Field(0.5, gt=0, lt=1, description="A number.")
    count: int | None = Field(None, ge=1, description="A count.")
    choice: Literal["a", "b"] = Field("a", description="A choice.")
    either: int | str = Field(1, description="One or the other.")
    rows: tuple[Row, ...] = Field((), description="Rows.")
    pair: tuple[int, int] | None = Field(None, description="A pair.")
    file: Path | None = Field(None, description="A file.")
    table: dict[str, int] = Field({}, description="A table.")
    names: tuple[str, ...] = Field((), max_length=3, description="Names.")
    needed: bool = Field(description="Needed.")


@pytest.mark.parametrize(
    ("key", "kind", "default", "limits"),
    [
        ("number", "number", "0.5", "above 0, below 1"),
        ("count", "whole number", "unset", "at least 1"),
        ("choice", "'a' or 'b'", "'a'", ""),
        ("either", "whole number or text", "1", ""),
        ("rows", "list of {name}", "[]", ""),
        ("pair", "list of 2 entries (whole number, whole number)", "unset", ""),
        ("file", "path", "unset", ""),
        ("table", "table", "a table", ""),
        ("names", "list of text", "[]", "at most 3 entries"),
        ("needed", "true or false", "required", ""),
    ],
)
def test_an_option_is_described_in_words(key: str, kind: str, default: str, limits: str) -> None:
    found = {option.key: option for option in described(Sample)}[key]
    help_text = Sample.model_fields[key].description or ""
    assert found == Described(key=key, kind=kind, default=default, limits=limits, help=help_text)


@pytest.mark.parametrize("name", ["gone", "a\0b", "x" * 5000])
def test_a_name_that_no_file_system_takes_is_nowhere(tmp_path: Path, name: str) -> None:
    assert not is_file(tmp_path / name)
    assert not is_folder(tmp_path / name)


def test_files_and_folders_are_told_apart(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    assert (is_file(tmp_path / "file"), is_folder(tmp_path / "file")) == (True, False)
    assert (is_file(tmp_path), is_folder(tmp_path)) == (False, True)

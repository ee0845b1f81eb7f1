"""Dotted paths: what a module's source says of a name, found and read without importing anything."""

from __future__ import annotations

import ast
import importlib
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest

from drl.dotted import (
    facts_of,
    imported,
    is_dotted,
    read_definition,
    source_file,
    table_name,
)
from drl.errors import BadInput, UnknownComponent

LOUD = "raise SystemExit('imported')\n"

SOURCE = """
from elsewhere import borrowed
import os as module
from functools import wraps

def keep(run, groups): ...
async def score(run, samples): ...
class Source: ...
LIMIT = 3
FEW = (1, 2)
made = make()
first, second = keep, keep
typed: int = 3

@wraps(keep)
def covered(*a): ...

if module.name == "nt":
    def either(run): ...
else:
    def either(run, groups): ...

try:
    import fast
except ImportError:
    def fallback(run): ...

with module.fork():
    def inside(run): ...
"""


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str, str], None]:
    """Write a file into a folder that Python searches."""
    monkeypatch.syspath_prepend(tmp_path)

    def write(path: str, text: str) -> None:
        file = tmp_path / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
        importlib.invalidate_caches()

    return write


@pytest.fixture
def acme(package: Callable[[str, str], None]) -> None:
    """A package that ends the process of whoever imports any part of it."""
    package("acme_loud/__init__.py", LOUD)
    package("acme_loud/inner/__init__.py", LOUD)
    package("acme_loud/inner/filters.py", LOUD + SOURCE)


@pytest.mark.parametrize("path", ["a:b", "a.b.c:D", "_a._1:_b", "drl.api:Loss"])
def test_a_path_has_a_module_and_one_name(path: str) -> None:
    assert is_dotted(path)


@pytest.mark.parametrize(
    "path", ["", "a", "a.b", ":b", "a:", "a:b:c", "a:b.c", "a..b:c", ".a:b", "1a:b", "a b:c", "ä:b",
             "a/b:c", "../a:b", "a:b\n"],
)  # fmt: skip
def test_anything_else_is_no_path(path: str) -> None:
    assert not is_dotted(path)


@pytest.mark.parametrize(
    ("name", "table"),
    [
        ("ocr", "ocr"),
        ("acme.rewards:Tone", "tone"),
        ("acme:JpegSize2Reward", "jpeg_size2_reward"),
        ("acme:_Hidden", "hidden"),
        ("acme:_", "reward"),
    ],
)
def test_a_reward_named_by_its_path_is_called_like_its_class(name: str, table: str) -> None:
    assert table_name(name) == table


@pytest.mark.parametrize(
    ("name", "kind", "why"),
    [
        ("keep", "function", ""),
        ("score", "function", ""),
        ("fallback", "function", ""),
        ("inside", "function", ""),
        ("Source", "class", ""),
        ("LIMIT", "value", ""),
        ("FEW", "value", ""),
        ("typed", "unclear", "computes it"),
        ("made", "unclear", "computes it"),
        ("second", "unclear", "computes it"),
        ("borrowed", "unclear", "imports it"),
        ("module", "unclear", "imports it"),
        ("covered", "unclear", "decorates covered"),
        ("either", "unclear", "defines either more than once"),
    ],
)
def test_the_source_says_what_a_name_is(acme: None, name: str, kind: str, why: str) -> None:
    found = read_definition(f"acme_loud.inner.filters:{name}")
    assert found.kind == kind
    assert why in found.why
    assert bool(found.why) == (kind == "unclear")
    assert (found.function is not None) == (kind == "function")
    assert not {"acme_loud", "acme_loud.inner"} & set(sys.modules)


@pytest.mark.parametrize(
    ("path", "said"),
    [
        ("acme_loud.inner.filters:kep", "acme_loud.inner.filters has no kep; did you mean 'keep'?"),
        ("acme_loud.inner.filters:zzz", "it defines Source, covered, either, fallback"),
        (
            "acme_loud.inner.filter:keep",
            "acme_loud.inner has no module 'filter'; did you mean 'fil",
        ),
        ("acme_loud.iner.filters:keep", "acme_loud has no module 'iner'; did you mean 'inner'?"),
        ("acme_loud.inner.filters.deep:x", "acme_loud.inner.filters has no module 'deep'"),
        ("acme_none.filters:keep", "there is no module 'acme_none': install it, or put its folder"),
    ],
)
def test_what_is_not_there_is_named_with_the_nearest(acme: None, path: str, said: str) -> None:
    with pytest.raises(UnknownComponent) as refusal:
        read_definition(path)
    assert said in str(refusal.value)
    assert refusal.value.exit_code == 2


@pytest.mark.parametrize("text", ["def f(:", "\0", "((" * 500, "x = '\udcff'"])
def test_a_file_that_is_no_python_is_named(
    package: Callable[[str, str], None], tmp_path: Path, text: str
) -> None:
    package("acme_no_python.py", "")
    (tmp_path / "acme_no_python.py").write_bytes(text.encode("utf-8", "surrogateescape"))
    with pytest.raises(
        UnknownComponent, match=r"acme_no_python:f: acme_no_python.py cannot be read"
    ):
        read_definition("acme_no_python:f")


def test_single_modules_and_packages_without_init_are_found(
    package: Callable[[str, str], None], tmp_path: Path
) -> None:
    package("acme_one.py", SOURCE)
    package("acme_space/part/filters.py", SOURCE)
    assert source_file("acme_one") == tmp_path / "acme_one.py"
    assert source_file("acme_space.part.filters") == tmp_path / "acme_space/part/filters.py"
    assert source_file("acme_space") is None
    assert read_definition("acme_space.part.filters:keep").kind == "function"
    with pytest.raises(UnknownComponent, match="acme_one has no module 'more'"):
        source_file("acme_one.more")


def test_two_folders_may_share_a_package_without_init(
    package: Callable[[str, str], None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package("acme_space/left.py", "def keep(a): ...")
    other = tmp_path / "other"
    (other / "acme_space").mkdir(parents=True)
    (other / "acme_space" / "right.py").write_text("def keep(b): ...")
    monkeypatch.syspath_prepend(other)
    importlib.invalidate_caches()
    for part, name in (("left", "a"), ("right", "b")):
        found = read_definition(f"acme_space.{part}:keep").function
        assert found is not None
        assert found.args.args[0].arg == name


def test_modules_without_source_are_left_to_the_start_of_a_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    archive = tmp_path / "acme.zip"
    with zipfile.ZipFile(archive, "w") as file:
        file.writestr("acme_zipped.py", "def keep(run, groups): ...")
    monkeypatch.syspath_prepend(archive)
    for path in ("acme_zipped:keep", "sys:exit", "_json:scanner"):
        found = read_definition(path)
        assert found.kind == "unclear"
        assert "has no source file" in found.why


@pytest.mark.parametrize("line", ["from acme_loud.inner import *", "def __getattr__(name): ..."])
def test_names_that_arrive_by_a_star_are_left_to_the_start(
    package: Callable[[str, str], None], line: str
) -> None:
    package("acme_star.py", line)
    found = read_definition("acme_star:keep")
    assert (found.kind, found.why) == ("unclear", "acme_star does not define keep itself")


def test_a_class_states_its_facts_as_plain_attributes(package: Callable[[str, str], None]) -> None:
    package(
        "acme_facts.py",
        """
class Loss:
    needs: frozenset = frozenset({Need.ROLLOUT, Need.OLD_LOG_PROB})
    has_density = False
    payload = "lora"
    pair = (1, 2)
    none = frozenset()
    step_share = "share"
    odd = compute()
    broken = frozenset({Need.NOTHING})
    other = list([1])
    a = b = 3
    declared: int
    def method(self): ...
""",
    )
    assert facts_of(read_definition("acme_facts:Loss")) == {
        "needs": ("rollout", "old_log_prob"),
        "has_density": False,
        "payload": "lora",
        "pair": (1, 2),
        "none": (),
    }
    assert facts_of(read_definition("json:dumps")) == {}


def test_importing_gives_the_object_itself(package: Callable[[str, str], None]) -> None:
    package("acme_quiet.py", "def keep(): return 7\ndef __getattr__(name): return name")
    assert imported("acme_quiet:keep")() == 7
    assert imported("acme_quiet:anything") == "anything"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("x = 1\nraise RuntimeError('no licence')", "RuntimeError: no licence ("),
        ("x = 1\nraise SystemExit(3)", "SystemExit: 3 ("),
        ("x = 1\nimport acme_absent", "ModuleNotFoundError: No module named 'acme_absent' ("),
    ],
)
def test_a_module_that_fails_is_named_with_file_and_line(
    package: Callable[[str, str], None], text: str, said: str
) -> None:
    package("acme_fails.py", text)
    with pytest.raises(BadInput) as refusal:
        imported("acme_fails:keep")
    assert f"acme_fails:keep cannot be imported: {said}" in str(refusal.value)
    assert str(refusal.value).endswith("acme_fails.py, line 2)")
    assert refusal.value.__cause__ is not None


def test_a_name_that_is_not_there_after_all_has_a_neighbour(
    package: Callable[[str, str], None],
) -> None:
    package("acme_near.py", "keep = 1")
    with pytest.raises(UnknownComponent, match="acme_near has no kep; did you mean 'keep'"):
        imported("acme_near:kep")


def test_reading_a_large_module_takes_no_import_of_it() -> None:
    before = set(sys.modules)
    found = read_definition("http.server:BaseHTTPRequestHandler")
    assert isinstance(found.node, ast.ClassDef)
    assert "http.server" not in set(sys.modules) - before

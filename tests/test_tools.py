"""The scripts of tools/: limits, versions, listings, new members."""

from __future__ import annotations

import shutil
import tomllib
from pathlib import Path

import pytest

import bump_version
import check_types
import hook_reference
import house
import new_plugin
import public_api
from signatures import signature_of

ROOT = Path(__file__).resolve().parents[1]


def source(tmp_path: Path, text: str, name: str = "module.py") -> house.Source:
    """Parse a text as house.py would."""
    (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
    (tmp_path / name).write_text(text)
    return house.read(tmp_path, Path(name))


def function_of(lines: int, name: str = "work") -> str:
    """A typed function of that many lines."""
    return f"def {name}() -> None:\n" + "    pass\n" * (lines - 1)


@pytest.mark.parametrize(
    ("lines", "name", "offends"), [(80, "a", 0), (81, "a", 1), (200, "train", 0)]
)
def test_a_function_has_at_most_80_lines_unless_it_is_train(
    tmp_path: Path, lines: int, name: str, offends: int
) -> None:
    found = list(house.long_functions([source(tmp_path, function_of(lines, name))]))
    assert len(found) == offends
    assert all(line == "module.py:1: a has 81 lines; at most 80" for line in found)


@pytest.mark.parametrize(("lines", "offends"), [(399, 0), (400, 1)])
def test_a_file_has_fewer_than_400_lines(tmp_path: Path, lines: int, offends: int) -> None:
    assert len(list(house.long_files([source(tmp_path, "x = 1\n" * lines)]))) == offends


@pytest.mark.parametrize(
    ("signature", "missing"),
    [
        ("(a: int, *, b: str = '') -> None", None),
        ("(self, a: int) -> None", None),
        ("(a) -> None", "a"),
        ("(a: int)", "the result"),
        ("(*args: int, **options) -> None", "options"),
        ("(*, key) -> None", "key"),
        ("(a, /)", "a, the result"),
    ],
)
def test_every_argument_and_result_of_the_code_is_typed(
    tmp_path: Path, signature: str, missing: str | None
) -> None:
    text = f"class A:\n    async def work{signature}: ...\n"
    found = list(house.untyped([source(tmp_path, text)]))
    expected = [] if missing is None else [f"module.py:2: work leaves {missing} without a type"]
    assert found == expected
    assert list(house.untyped([source(tmp_path, text, "tests/test_module.py")])) == []


def test_nine_functions_of_ten_are_under_40_lines(tmp_path: Path) -> None:
    short, long = function_of(10), function_of(60)
    assert list(house.function_tail([source(tmp_path, short * 19 + long)])) == []
    assert len(list(house.function_tail([source(tmp_path, short * 8 + long * 4)]))) == 1


def test_there_are_as_many_lines_of_tests_as_of_code(tmp_path: Path) -> None:
    code = source(tmp_path, "x = 1\n\n\n" * 10)
    enough = source(tmp_path, "x = 1\n" * 10, "tests/helper.py")
    too_few = source(tmp_path, "x = 1\n" * 9, "test_other.py")
    assert house.line_counts([code, enough]) == (10, 10)
    assert list(house.test_share([code, enough])) == []
    assert list(house.test_share([code, too_few])) == [
        "9 lines of tests for 10 of code; at least 1 a line"
    ]


def test_contracts_that_ship_are_code(tmp_path: Path) -> None:
    contract = source(tmp_path, "def work(a): ...\n" * 5, "drl/testing/contracts/loss.py")
    assert not contract.is_test
    assert house.line_counts([contract]) == (5, 0)
    assert len(list(house.untyped([contract]))) == 5


def test_helpers_of_tests_are_tests_and_names_that_only_look_so_are_not(tmp_path: Path) -> None:
    helper = source(tmp_path, "def work(a): ...\n", "tests/gpu/pipelines.py")
    named = source(tmp_path, "def work(a): ...\n", "src/testing/contest.py")
    assert [helper.is_test, named.is_test] == [True, False]
    assert list(house.untyped([helper])) == []


def test_lengths_of_test_functions_stay_out_of_the_percentile(tmp_path: Path) -> None:
    code = source(tmp_path, function_of(10) * 5)
    tests = source(tmp_path, function_of(70) * 5, "tests/test_long.py")
    assert house.function_p90([code, tests]) == 10
    assert house.summary([code, tests]) == (
        "2 files, 50 lines of code, 350 of tests; functions: 90th percentile 10, longest 70 lines"
    )
    assert house.function_p90([]) == 0


def test_house_reads_the_files_of_this_tree() -> None:
    files = house.python_files(ROOT)
    assert Path("tools/house.py") in files
    assert not any(".venv" in path.parts for path in files)


def test_types_are_checked_with_every_source_root() -> None:
    roots = check_types.source_roots()
    assert ROOT / "core" / "src" in roots
    assert all(root.is_dir() for root in roots)
    assert len(roots) == len(bump_version.manifests(ROOT)) - 1


def copied_manifests(folder: Path) -> Path:
    """Copy what bump_version and new_plugin write to."""
    files = [*bump_version.manifests(ROOT), ROOT / "core" / "src" / "drl" / "__init__.py"]
    files += [ROOT / "requirements" / "dev.txt", ROOT / "core/src/drl/known_plugins.toml"]
    for path in files:
        target = folder / path.relative_to(ROOT)
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(path, target)
    return folder


def test_bumping_changes_every_version_and_every_pin(tmp_path: Path) -> None:
    root = copied_manifests(tmp_path)
    changed = bump_version.bump(root, "9.8.7")
    assert len(changed) == len(bump_version.manifests(root)) + 1
    for path in bump_version.manifests(root):
        project = tomllib.loads(path.read_text())["project"]
        assert project["version"] == "9.8.7"
        for need in project.get("dependencies", []):
            assert not need.startswith("drl-") or need.endswith("==9.8.7")
    assert '__version__ = "9.8.7"' in (root / "core/src/drl/__init__.py").read_text()


def test_bumping_leaves_foreign_pins_alone() -> None:
    manifest = 'version = "0.1.0"\ndependencies = ["drl-core==0.1.0", "torch==2.13.0"]\n'
    assert bump_version.bumped(manifest, "0.2.0") == (
        'version = "0.2.0"\ndependencies = ["drl-core==0.2.0", "torch==2.13.0"]\n'
    )


def test_bumping_writes_nothing_when_a_manifest_is_odd(tmp_path: Path) -> None:
    root = copied_manifests(tmp_path)
    (root / "cli" / "pyproject.toml").write_text("[project]\n")
    with pytest.raises(ValueError, match=r"cli/pyproject.toml: expected one line"):
        bump_version.bump(root, "9.8.7")
    assert "9.8.7" not in (root / "core" / "pyproject.toml").read_text()


@pytest.mark.parametrize("arguments", [[], ["1.2"], ["v1.2.3"], ["1.2.3", "x"]])
def test_bumping_wants_one_version(arguments: list[str]) -> None:
    assert bump_version.main(arguments) == 2


@pytest.mark.parametrize("kind", ["reward", "loss", "function"])
def test_a_new_member_is_enrolled_with_an_exact_pin(tmp_path: Path, kind: str) -> None:
    root = copied_manifests(tmp_path)
    assert new_plugin.main([kind, "fresh_one"], root) == 0
    folder = root / "plugins" / f"{kind}{'es' if kind == 'loss' else 's'}" / "fresh_one"
    project = tomllib.loads((folder / "pyproject.toml").read_text())["project"]
    core = tomllib.loads((ROOT / "core" / "pyproject.toml").read_text())["project"]["version"]
    assert project["name"] == f"drl-{kind}-fresh-one"
    assert project["version"] == core
    assert project["dependencies"] == [f"drl-core=={core}"]
    assert (folder / "src" / f"drl_{kind}_fresh_one" / "py.typed").is_file()
    lines = (root / "requirements" / "dev.txt").read_text().splitlines()
    assert f"-e ./{folder.relative_to(root).as_posix()}" in lines
    known = tomllib.loads((root / "core/src/drl/known_plugins.toml").read_text())
    assert known[kind]["fresh_one"] == f"drl-{kind}-fresh-one"
    assert "$" not in "".join(path.read_text() for path in folder.rglob("*") if path.is_file())


def test_a_package_elsewhere_depends_on_the_release_series(tmp_path: Path) -> None:
    assert new_plugin.main(["reward", "fresh_one", str(tmp_path / "mine")]) == 0
    project = tomllib.loads((tmp_path / "mine" / "pyproject.toml").read_text())["project"]
    assert project["dependencies"] == ["drl-core>=0.1,<0.2"]
    assert new_plugin.series("1.4.2") == "drl-core>=1.4,<1.5"


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("Bad-Name", "must be lower_snake"),
        ("ocr", "is a component of drl-reward-ocr"),
        ("taken", "exists and is not an empty folder"),
    ],
)
def test_a_new_plugin_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str, said: str
) -> None:
    (tmp_path / "taken").mkdir()
    (tmp_path / "taken" / "file").touch()
    assert new_plugin.main(["reward", name, str(tmp_path / name)]) == 2
    assert said in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["taken"]


def test_signatures_print_without_quotes() -> None:
    assert signature_of(source) == (
        "(tmp_path: Path, text: str, name: str = 'module.py') -> house.Source"
    )


def test_the_listing_has_fields_methods_and_what_is_abstract() -> None:
    lines = public_api.listing().splitlines()
    assert "[drl.api]" in lines
    assert "    abstract advantages(self, rewards: GroupedRewards) -> Advantages" in lines
    assert "    weight: float = 1.0" in lines
    assert "    property effective -> float" in lines
    assert not any(line.strip().startswith("_") for line in lines if "__init__" not in line)


@pytest.mark.parametrize("tool", [public_api, hook_reference])
def test_listings_refuse_other_arguments(tool: object, capsys: pytest.CaptureFixture[str]) -> None:
    assert tool.main(["--wrote"]) == 2  # type: ignore[attr-defined]
    assert "usage" in capsys.readouterr().err


def test_ci_runs_lint_and_test_from_anywhere() -> None:
    script = ROOT / ".ci" / "run"
    assert script.stat().st_mode & 0o100
    assert script.read_text().splitlines()[-2:] == ["make lint", "make test"]

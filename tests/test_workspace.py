"""Guards of the tree: members, versions, pins, entry points, imports, the public interface, the docs."""

from __future__ import annotations

import ast
import re
import subprocess
import tomllib
from functools import cache
from importlib.metadata import entry_points
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

import drl
from drl.catalog import Catalog, known_plugins
from drl.kinds import BY_NAME, KINDS
from drl.plugins import GROUP, owner_of
from drl.testing.imports import import_failures
from hook_reference import PAGE, hooks, page
from public_api import LISTING, listing
from signatures import signature_of

ROOT = Path(__file__).resolve().parents[1]
PLUGINS = sorted(path.parent for path in ROOT.glob("plugins/*/*/pyproject.toml"))
MEMBERS = [ROOT / "core", ROOT / "cli", *PLUGINS]
BY_ID = [member.relative_to(ROOT).as_posix() for member in MEMBERS]

PLUGIN_MAY_IMPORT = (
    "drl.api",
    "drl.options",
    "drl.mathematics",
    "drl.lora",
    "drl.errors",
    # how a module computes and where it is, the same for trainer and engine
    "drl.model.compiled",
    "drl.model.moving",
    "drl.model.prepare",
)

# A layer imports itself and those before it; what stands in none of them is wiring and may import all.
LAYERS: tuple[tuple[str, ...], ...] = (
    (
        "drl.errors",
        "drl.components",
        "drl.kinds",
        "drl.types",
        "drl.interfaces",
        "drl.options",
        "drl.api",
        "drl.hookspecs",
        "drl.plugins",
        "drl.catalog",
        "drl.config",
        "drl.dotted",
    ),
    ("drl.mathematics",),
    ("drl.lora", "drl.media", "drl.model", "drl.stages"),
    ("drl.loop", "drl.cluster"),
    ("drl_cli",),
)


def project(member: Path) -> dict[str, Any]:
    """The [project] table of a member."""
    table: dict[str, Any] = tomllib.loads((member / "pyproject.toml").read_text("utf-8"))["project"]
    return table


def package_of(member: Path) -> str:
    """The top-level package of a member."""
    (package,) = (
        path.name for path in (member / "src").iterdir() if (path / "__init__.py").exists()
    )
    return package


@cache
def imports_of(path: Path) -> tuple[tuple[str, bool], ...]:
    """Dotted names that a file imports, and whether at run time (outside ``if TYPE_CHECKING``)."""
    found: list[tuple[str, bool]] = []

    def visit(node: ast.AST, runs: bool) -> None:
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            for child in node.body:
                visit(child, False)
            for child in node.orelse:
                visit(child, runs)
            return
        if isinstance(node, ast.Import):
            found.extend((alias.name, runs) for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.level == 0:  # a relative one stays inside
            found.append((node.module or "", runs))
            found.extend((f"{node.module}.{alias.name}", runs) for alias in node.names)
        for child in ast.iter_child_nodes(node):
            visit(child, runs)

    visit(ast.parse(path.read_text("utf-8")), True)
    return tuple(found)


def within(name: str, packages: tuple[str, ...]) -> bool:
    """True when a dotted name is one of the packages or lies in one."""
    return any(name == package or name.startswith(f"{package}.") for package in packages)


def sources(member: Path) -> list[Path]:
    """The code of a member."""
    return sorted((member / "src").rglob("*.py"))


def tracked() -> list[str]:
    """Paths of all files that git tracks or would track."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    return [name for name in done.stdout.splitlines() if (ROOT / name).is_file()]


def test_there_are_members() -> None:
    assert len(PLUGINS) >= 9


def test_every_member_has_its_line_in_the_requirements_and_no_other_is_there() -> None:
    lines = (ROOT / "requirements" / "dev.txt").read_text("utf-8").splitlines()
    listed = [line.removeprefix("-e ./") for line in lines if line.startswith("-e ")]
    assert sorted(listed) == sorted(BY_ID)


def test_all_versions_are_the_same() -> None:
    workspace = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    versions = {project(member)["version"] for member in MEMBERS}
    assert versions == {workspace["version"]} == {drl.__version__}


@pytest.mark.parametrize("member", MEMBERS, ids=BY_ID)
def test_pins_between_members_are_exact_and_point_to_members(member: Path) -> None:
    table = project(member)
    ours = {project(other)["name"] for other in MEMBERS}
    needed = [need for need in table["dependencies"] if need.startswith("drl-")]
    assert member.name == "core" or f"drl-core=={drl.__version__}" in needed
    for need in needed:
        name, _, pin = need.partition("==")
        assert name in ours
        assert pin == drl.__version__


@pytest.mark.parametrize("member", MEMBERS, ids=BY_ID)
def test_names_follow_the_folder(member: Path) -> None:
    table = project(member)
    assert member.name == "core" or package_of(member) == table["name"].replace("-", "_")
    if member in PLUGINS:
        prefixes = {kind.plural: kind.prefix for kind in KINDS}
        assert table["name"].startswith(prefixes[member.parent.name])


@pytest.mark.parametrize("member", MEMBERS, ids=BY_ID)
def test_entry_points_name_modules_of_the_member(member: Path) -> None:
    points: dict[str, str] = project(member).get("entry-points", {}).get(GROUP, {})
    assert member.name == "cli" or points
    for module in points.values():
        assert module.partition(".")[0] == package_of(member)
        assert (member / "src" / Path(*module.split("."))).with_suffix(".py").is_file()
        assert find_spec(module) is not None


def test_the_installed_entry_points_are_those_of_the_members() -> None:
    stated = {
        (project(member)["name"], module)
        for member in MEMBERS
        for module in project(member).get("entry-points", {}).get(GROUP, {}).values()
    }
    installed = {(owner_of(point)[0], point.value) for point in entry_points(group=GROUP)}
    assert stated <= installed, "install the members again: make setup"


@pytest.mark.parametrize("member", MEMBERS, ids=BY_ID)
def test_every_member_has_a_readme_of_substance_and_is_typed(member: Path) -> None:
    assert (member / "README.md").stat().st_size > 200
    assert (member / "src" / package_of(member) / "py.typed").is_file()


@pytest.mark.parametrize("member", PLUGINS, ids=BY_ID[2:])
def test_every_plugin_runs_the_contracts_of_all_it_offers(member: Path) -> None:
    text = (member / "tests" / "test_contract.py").read_text("utf-8")
    name = project(member)["name"]
    assert f'distribution = "{name}"' in text
    for entry in Catalog.load().entries():
        if entry.distribution == name:
            assert f'component = ("{entry.kind}", "{entry.component.name}")' in text


def test_known_plugins_are_what_the_members_offer() -> None:
    offered = {
        (entry.kind, entry.component.name): entry.distribution
        for entry in Catalog.load().entries()
        if entry.distribution != "drl-core" and entry.distribution in map(member_name, MEMBERS)
    }
    ours = {key: owner for key, owner in known_plugins().items() if owner in offered.values()}
    assert ours == offered


def member_name(member: Path) -> str:
    """Name of a member's distribution."""
    return str(project(member)["name"])


def test_every_installed_member_loads() -> None:
    ours = {member_name(member) for member in MEMBERS}
    failures = [f for f in Catalog.load().failures if f.distribution in ours]
    assert [f"{f.owner} {f.entry_point}: {f.reason}" for f in failures] == []


def test_plugin_and_config_modules_import_nothing_heavy() -> None:
    catalog = Catalog.load()
    modules = {point.value for point in entry_points(group=GROUP)}
    configs = {
        e.component.config.partition(":")[0] for e in catalog.entries() if e.component.config
    }
    assert import_failures(sorted(modules | configs)) == {}


@pytest.mark.parametrize("member", PLUGINS, ids=BY_ID[2:])
def test_plugins_import_the_public_interface_and_themselves_only(member: Path) -> None:
    own = package_of(member)
    for path in sources(member):
        for name, _ in imports_of(path):
            if name.partition(".")[0] in ("drl", "drl_cli") or name.startswith("drl_"):
                place = path.relative_to(ROOT)
                assert within(name, (*PLUGIN_MAY_IMPORT, own)), f"{place} imports {name}"


@pytest.mark.parametrize("member", PLUGINS, ids=BY_ID[2:])
def test_a_plugin_module_imports_the_api_and_a_config_module_the_options(member: Path) -> None:
    for path in sources(member):
        allowed = {"plugin.py": "drl.api", "config.py": "drl.options"}.get(path.name)
        if allowed and path.parent.name == package_of(member):
            ours = {name for name, _ in imports_of(path) if within(name, ("drl",))}
            assert all(within(name, (allowed,)) for name in ours), f"{path}: {ours}"


def test_core_imports_no_plugin_and_not_the_command() -> None:
    for path in sources(ROOT / "core"):
        names = [name for name, _ in imports_of(path) if name.startswith("drl_")]
        assert names == [], path


def test_imports_go_from_later_layers_to_earlier_ones() -> None:
    wrong = []
    for path in [*sources(ROOT / "core"), *sources(ROOT / "cli")]:
        relative = path.relative_to(next(m for m in MEMBERS if m in path.parents) / "src")
        module = ".".join(relative.with_suffix("").parts).removesuffix(".__init__")
        layer = layer_of(module)
        for name, runs in imports_of(path):
            other = layer_of(name)
            if runs and layer is not None and other is not None and other > layer:
                wrong.append(f"{module} imports {name}")
    # Context.generator is the one door from the data types to the mathematics; it opens when called.
    assert [
        line
        for line in wrong
        if not line.startswith("drl.types.context imports drl.mathematics.seeding")
    ] == []


def layer_of(module: str) -> int | None:
    """Number of the layer that a module belongs to."""
    return next((n for n, layer in enumerate(LAYERS) if within(module, layer)), None)


def test_the_public_interface_is_as_listed() -> None:
    stored = LISTING.read_text("utf-8")
    assert listing() == stored, "the interface changed: python tools/public_api.py --write"


def test_the_hook_page_is_that_of_the_specifications() -> None:
    assert page() == PAGE.read_text("utf-8"), "python tools/hook_reference.py --write"


def test_every_hook_stands_in_the_docs_with_its_exact_signature() -> None:
    text = PAGE.read_text("utf-8")
    for name, function in hooks():
        assert f"\n{name}{signature_of(function)}\n" in text


def test_every_hook_is_called_by_drl() -> None:
    code = "\n".join(
        path.read_text("utf-8")
        for member in (ROOT / "core", ROOT / "cli")
        for path in sources(member)
        if path.name != "hookspecs.py"
    )
    registered = {kind.hook for kind in KINDS}
    calls = {name for name, _ in hooks()} - registered
    silent = [name for name in calls if not re.search(rf'\.{name}\(|"{name}"', code)]
    assert sorted(silent) == []


def test_every_kind_has_a_contract() -> None:
    contracts = ROOT / "core" / "src" / "drl" / "testing" / "contracts"
    assert {path.stem for path in contracts.glob("*.py")} >= set(BY_NAME)


def test_no_path_of_a_machine_is_in_the_tree() -> None:
    pattern = re.compile(r"/(?:work|root|home|Users)/\w")
    found = []
    for name in tracked():
        path = ROOT / name
        if path.suffix in (
            ".py",
            ".md",
            ".toml",
            ".txt",
            ".cfg",
            ".yaml",
            ".json",
            ".template",
            "",
        ):
            found += [name for line in path.read_text("utf-8").splitlines() if pattern.search(line)]
    assert found == []


def test_the_licence_is_there_and_stated_by_every_member() -> None:
    assert "Apache License" in (ROOT / "LICENSE").read_text("utf-8")
    assert {project(member)["license"] for member in MEMBERS} == {"Apache-2.0"}

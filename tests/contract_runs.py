"""Run contract classes on right and wrong components through pytest itself, and read what it says."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.metadata import EntryPoint
from itertools import count
from pathlib import Path
from typing import Any

import pytest

from drl.catalog import Catalog
from drl.components import EMPTY, Component
from drl.plugins import GROUP

CLASSES: dict[str, dict[str, type]] = {}
"""Contract classes that a collected file picks up, by the name of the file."""

FILE = """
from contract_runs import CLASSES
globals().update(CLASSES[{key!r}])
"""

_numbers = count()  # two modules of one name would be one module


@dataclass
class Verdict:
    """What became of the checks of one component: passed, failed with a message, skipped with a reason."""

    passed: set[str] = field(default_factory=set)
    failed: dict[str, str] = field(default_factory=dict)
    skipped: dict[str, str] = field(default_factory=dict)

    def add(self, check: str, report: pytest.TestReport) -> None:
        """Sort one report; a check with parameters failed when one of them did."""
        if report.failed:
            self.failed.setdefault(check, report.longreprtext)
            self.passed.discard(check)
        elif report.skipped:
            self.skipped[check] = str(report.longrepr)
        elif report.when == "call" and check not in self.failed:
            self.passed.add(check)


@dataclass
class Verdicts:
    """A pytest plugin that collects the verdicts by component."""

    found: dict[str, Verdict] = field(default_factory=dict)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Find the component in the node's class, the check in its function."""
        name, _, check = report.nodeid.partition("::Test_")[2].partition("::")
        self.found.setdefault(name, Verdict()).add(check.partition("[")[0], report)


def plugin_in(module: str) -> Catalog:
    """Return a catalog of one plugin: a test module with ``drl_register_*`` hooks."""
    return Catalog.load(installed=[EntryPoint(name="wrong", value=module, group=GROUP)])


def offered(
    classes: Iterable[type], *, config: str | None = None, facts: Mapping[str, Any] = EMPTY
) -> list[Component]:
    """Return components of these classes, called like them in lower case."""
    return [
        Component(
            one.__name__.lower(),
            f"{one.__module__}:{one.__name__}",
            summary="Made for a test.",
            config=config,
            facts=facts,
        )
        for one in dict.fromkeys(classes)
    ]


def judged(
    contract: type,
    folder: Path,
    cases: Iterable[tuple[type, str]],
    *,
    honest: type | None = None,
    members: Mapping[str, Any] = EMPTY,
) -> dict[str, Verdict]:
    """Try every check on ``honest``, the named ones on the wrong classes; verdicts by class name.

    ``members`` are set on the contract's subclasses. All of it is one run of pytest.
    """
    kind = vars(contract)["component"][0]
    wanted: dict[str, list[str]] = {} if honest is None else {honest.__name__: []}
    for wrong, check in cases:
        wanted.setdefault(wrong.__name__, []).append(check)
    classes = {
        f"Test_{name}": subclass(contract, component=(kind, name.lower()), **members)
        for name in wanted
    }
    return run_classes(classes, folder, wanted)


def subclass(contract: type, **members: Any) -> type:
    """Return a subclass that pytest collects."""
    return type(
        contract.__name__,
        (contract,),
        {"__test__": True, "__module__": contract.__module__} | members,
    )


def run_classes(
    classes: Mapping[str, type], folder: Path, wanted: Mapping[str, Sequence[str]]
) -> dict[str, Verdict]:
    """Run classes called ``Test_<name>``: the wanted checks of each name, or all where none is named."""
    file = folder / f"test_made_{next(_numbers)}.py"
    CLASSES[file.stem] = dict(classes)
    file.write_text(FILE.format(key=file.stem))
    (folder / "pytest.ini").write_text("[pytest]\n")
    nodes = [
        f"{file}::Test_{name}" + (f"::{check}" if check else "")
        for name, checks in wanted.items()
        for check in (dict.fromkeys(checks) or [""])
    ]
    plugin = Verdicts()
    options = ["-q", "-c", str(folder / "pytest.ini"), f"--basetemp={folder / 'base'}"]
    off = ("cacheprovider", "faulthandler", "unraisableexception")  # the outer run has them
    options += [word for name in off for word in ("-p", f"no:{name}")]
    options.append("--import-mode=importlib")
    code = pytest.main([*options, *nodes], plugins=[plugin])
    del CLASSES[file.stem]
    assert code in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED), (code, nodes)
    return plugin.found

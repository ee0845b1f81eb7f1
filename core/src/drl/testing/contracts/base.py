"""What every contract class has: the component under test, and a guard against silent overrides."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path
from typing import Any, ClassVar

import pytest

from drl.catalog import Catalog
from drl.testing.builders import make_pair, make_prompt, make_sample
from drl.types import Context, Pair, Prompt, Sample


@cache
def installed_catalog() -> Catalog:
    """Return the catalog of this environment, loaded once for all contracts of a test session."""
    return Catalog.load()


class ContractBase:
    """Base of the contracts of ``drl.testing``.

    A subclass states ``component = (kind, name)``, and in ``capabilities`` what the component cannot
    do (``{"video": False}``): tests that need it are skipped with that as the reason. Fixtures that an
    author may override: ``option_values`` (a dict of its option table), ``section`` (core's own
    options of the recipe section, as ``context.section``), ``context``.
    """

    component: ClassVar[tuple[str, str]]
    capabilities: ClassVar[Mapping[str, bool]] = {}

    @pytest.fixture
    def catalog(self) -> Catalog:
        """Everything that is installed."""
        return installed_catalog()

    @pytest.fixture
    def option_values(self) -> dict[str, Any]:
        """What a recipe would write in the component's option table; empty: the defaults."""
        return {}

    @pytest.fixture
    def options(self, catalog: Catalog, option_values: dict[str, Any]) -> Any:
        """The validated options, or None for a component without options."""
        model = catalog.options_model(*self.component)
        return None if model is None else model.model_validate(option_values)

    @pytest.fixture
    def section(self) -> Any:
        """Core's own options of the section that the component is chosen in."""
        return None

    @pytest.fixture
    def context(self, section: Any, tmp_path: Path) -> Context:
        """Where the component runs: rank 0 of 1 on the CPU, seed 0."""
        return Context(run_dir=tmp_path, section=section)

    @pytest.fixture
    def instance(self, catalog: Catalog, options: Any, context: Context) -> Any:
        """A fresh component, made as a run makes it."""
        return catalog.create(*self.component, options, context)

    @pytest.fixture
    def make_prompt(self) -> Callable[..., Prompt]:
        """``drl.testing.make_prompt``."""
        return make_prompt

    @pytest.fixture
    def make_sample(self) -> Callable[..., Sample]:
        """``drl.testing.make_sample``."""
        return make_sample

    @pytest.fixture
    def make_pair(self) -> Callable[..., Pair]:
        """``drl.testing.make_pair``."""
        return make_pair

    def require(self, capability: str) -> None:
        """Skip the running test when the component states that it lacks this capability."""
        if not self.capabilities.get(capability, True):
            pytest.skip(f"{self.component[0]} '{self.component[1]}' states {capability} = False")

    def test_no_contract_test_is_overridden_without_a_reason(self) -> None:
        """A contract test may be replaced only under ``@pytest.mark.xfail(reason="…")``."""
        assert overridden_without_reason(type(self)) == []


def overridden_without_reason(contract: type) -> list[str]:
    """Return the names of contract tests that a class replaces without ``xfail(reason=…)``."""
    promised = {
        name for base in contract.__mro__ if _is_ours(base) for name in vars(base) if _is_test(name)
    }
    replaced = {
        name: member
        for base in reversed(contract.__mro__)
        if not _is_ours(base)
        for name, member in vars(base).items()
        if name in promised
    }
    return sorted(name for name, member in replaced.items() if not _has_reason(member))


def _is_ours(base: type) -> bool:
    return base.__module__.startswith("drl.testing.contracts")


def _is_test(name: str) -> bool:
    return name.startswith("test_")


def _has_reason(member: object) -> bool:
    """True for a function under ``xfail`` with a reason; anything else hides the test for good."""
    if not inspect.isfunction(member):
        return False
    marks = vars(member).get("pytestmark", [])
    return any(mark.name == "xfail" and mark.kwargs.get("reason") for mark in marks)

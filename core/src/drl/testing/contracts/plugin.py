"""The contract of a distribution as a whole: what can be checked of its plugins without running them."""

from __future__ import annotations

from importlib.metadata import entry_points
from typing import ClassVar

import pytest

from drl.catalog import Catalog, Entry
from drl.doctor import complaints
from drl.plugins import GROUP, normalized, owner_of
from drl.testing.contracts.base import ContractBase
from drl.testing.imports import import_failures


class PluginContract(ContractBase):
    """State ``distribution``, the name that pip knows; nothing else is needed."""

    distribution: ClassVar[str]

    @pytest.fixture
    def modules(self) -> list[str]:
        """The plugin modules that the distribution's entry points name."""
        wanted = normalized(self.distribution)
        points = entry_points(group=GROUP)
        return sorted(p.value for p in points if normalized(owner_of(p)[0]) == wanted)

    @pytest.fixture
    def offered(self, catalog: Catalog) -> list[Entry]:
        """The components of the distribution."""
        wanted = normalized(self.distribution)
        return [e for e in catalog.entries() if normalized(e.distribution) == wanted]

    def test_an_entry_point_names_a_plugin_module(self, modules: list[str]) -> None:
        """Without one nothing of the distribution is found."""
        assert modules, (
            f"{self.distribution} has no entry point in the group {GROUP!r}; is it installed?"
        )

    def test_every_plugin_module_loads(self, catalog: Catalog) -> None:
        """The import works, ``DRL_API`` fits, hooks and their arguments exist, components are sound."""
        wanted = normalized(self.distribution)
        failed = [f.reason for f in catalog.failures if normalized(f.distribution) == wanted]
        assert failed == []

    def test_plugin_and_config_modules_import_nothing_heavy(
        self, modules: list[str], offered: list[Entry]
    ) -> None:
        """They are imported to list plugins and to check recipes, which must stay quick."""
        paths = [entry.component.config for entry in offered if entry.component.config]
        configs = {path.partition(":")[0] for path in paths}
        assert import_failures(sorted({*modules, *configs})) == {}

    def test_every_name_has_one_owner(self, catalog: Catalog, offered: list[Entry]) -> None:
        """No other plugin and no core option has the name of one of its components."""
        for entry in offered:
            component = entry.component
            assert catalog.find(entry.kind, component.name, component.slot) == entry

    def test_every_component_is_sound(self, catalog: Catalog, offered: list[Entry]) -> None:
        """Classes import and fit their kind, summaries are one sentence, options have help and
        defaults within their own limits."""
        found = {f"{e.kind} {e.component.name}": complaints(catalog, e) for e in offered}
        assert {label: lines for label, lines in found.items() if lines} == {}

"""From a name in a recipe to the component behind it, and the messages when there is none.

Listing and finding import no component, no option model and no pydantic; classes are imported by
``create`` once a recipe has picked them.
"""

from __future__ import annotations

import importlib
import tomllib
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import TYPE_CHECKING, Any

from drl.components import Component
from drl.dotted import Definition, facts_of, imported, is_dotted, read_definition
from drl.errors import BadInput, BrokenPlugin, ComponentConflict, ContractError, UnknownComponent
from drl.kinds import BY_NAME, FUNCTION, Kind
from drl.plugins import Entry, Failure, Plugins, load_plugins, normalized, place_of

if TYPE_CHECKING:
    from drl.api import Context
    from drl.options import Options

__all__ = ["Catalog", "Entry", "Failure", "known_plugins", "nearest_name"]


class Catalog:
    """All components that the installed plugins offer.

    Make one with ``Catalog.load()``; every process has its own, and only names, options and tensors
    travel between processes.
    """

    def __init__(self, plugins: Plugins) -> None:
        self.plugins = plugins
        self._entries = sorted(
            plugins.entries,
            key=lambda e: (e.kind, e.component.name, e.component.slot or "", e.distribution),
        )
        self._definitions: dict[str, Definition] = {}

    @classmethod
    def load(
        cls, off: Iterable[str] = (), installed: Iterable[EntryPoint] | None = None
    ) -> Catalog:
        """Load the installed plugins without the distributions ``off`` and ``DRL_PLUGINS_OFF``.

        ``installed`` replaces the entry points of this environment, for tests.
        """
        return cls(load_plugins(off, installed))

    @property
    def hooks(self) -> Any:
        """The hook relay: ``catalog.hooks.drl_run_started(run=run)`` asks every plugin."""
        return self.plugins.manager.hook

    @property
    def failures(self) -> list[Failure]:
        """Plugins that are installed but could not be loaded."""
        return self.plugins.failures

    @property
    def distributions(self) -> list[tuple[str, str]]:
        """Name and version of each distribution that a plugin was loaded from, sorted."""
        return sorted(set(self.plugins.owners.values()))

    def ask(self, hook: str, arguments: Mapping[str, Any]) -> list[tuple[str, Any]]:
        """Call a collected hook; return (distribution, answer) pairs, without the None answers."""
        return self.plugins.ask(hook, arguments)

    def entries(self, kind: str | None = None) -> list[Entry]:
        """Return all components of one kind, or of every kind, sorted by kind and name."""
        return [entry for entry in self._entries if kind in (None, entry.kind)]

    def names(self, kind: str, slot: str | None = None) -> list[str]:
        """Return the names of one kind, and of one slot of functions, sorted."""
        entries = self.entries(kind)
        return sorted({e.component.name for e in entries if slot in (None, e.component.slot)})

    def find(self, kind: str, name: str, slot: str | None = None) -> Entry:
        """Return the component of that kind and name, of functions in that slot, or in the first one.

        A dotted path is a component as well: what its source says stands in for what a plugin states.
        Raises UnknownComponent, BrokenPlugin when its package is installed but does not load, and
        ComponentConflict when the name has two owners or is a core option of its section.
        """
        row = BY_NAME[kind]
        if is_dotted(name):
            return self._named_by_path(row, name, slot)
        named = [
            e for e in self.entries() if e.component.name == name and _section(e) == row.section
        ]
        matching = [e for e in named if e.kind == kind and slot in (None, e.component.slot)]
        if not matching:
            raise self._missing(row, name, slot)
        place = place_of(matching[0])
        owners = [entry for entry in named if place_of(entry) == place]
        if len(owners) > 1:
            raise ComponentConflict(_two_owners(matching[0], owners))
        if owners[0].component.config is not None and name in _core_options(row.section):
            raise ComponentConflict(
                f"{row.option}: {_spoken(kind)} '{name}' of {owners[0].owner} has the name of the "
                f"core option {row.section}.{name}\n"
                f"  its options would have no place; switch it off: --without {owners[0].distribution}"
            )
        return owners[0]

    def definition(self, path: str) -> Definition:
        """Return what the source of a dotted path says; UnknownComponent when nothing is there."""
        if path not in self._definitions:
            self._definitions[path] = read_definition(path)
        return self._definitions[path]

    def _named_by_path(self, row: Kind, path: str, slot: str | None) -> Entry:
        found = self.definition(path)
        right = "function" if row.name == FUNCTION else "class"
        if found.kind not in (right, "unclear"):
            option = slot or row.option
            base = "" if row.name == FUNCTION else f" derived from drl.api.{_interface_name(row)}"
            raise UnknownComponent(f"{option}: {path} is a {found.kind}, not a {right}{base}")
        names = [e.component.name for e in self.entries(row.name) if e.component.target == path]
        if names and row.name != FUNCTION:  # by its path it would go without its options
            raise UnknownComponent(f"{path} is registered as {names[0]!r}: write that name")
        component = Component(
            path, path, summary="Named by its path.", facts=facts_of(found), slot=slot
        )
        return Entry(component, row.name, path.partition(".")[0].partition(":")[0], "(by its path)")

    def options_model(self, kind: str, name: str) -> type[Options] | None:
        """Return the model of the component's option table, or None when it has no options.

        Imports the light config module only; BrokenPlugin when that fails.
        """
        entry = self.find(kind, name)
        if entry.component.config is None:
            return None
        from drl.options import Options

        model = _imported(entry, entry.component.config)
        if not (isinstance(model, type) and issubclass(model, Options)):
            raise ContractError(
                f"{kind} '{name}' of {entry.owner}: {entry.component.config} must derive from "
                "drl.options.Options"
            )
        return model

    def component_class(self, kind: str, name: str) -> type:
        """Import and return the component's class; ContractError when it is not of its kind."""
        entry = self.find(kind, name)
        found = _imported(entry, entry.component.target)
        module, _, attribute = BY_NAME[kind].interface.partition(":")
        interface = vars(importlib.import_module(module))[attribute]
        if not (isinstance(found, type) and issubclass(found, interface)):
            raise ContractError(
                f"{kind} '{name}' of {entry.owner}: {entry.component.target} must derive from "
                f"drl.api.{attribute}"
            )
        missing = sorted(found.__abstractmethods__)  # type: ignore[attr-defined]  # every ABC has it
        if missing:
            raise ContractError(
                f"{kind} '{name}' of {entry.owner}: {entry.component.target} lacks {', '.join(missing)}"
            )
        return found

    def create(self, kind: str, name: str, options: Any, context: Context) -> Any:
        """Import the component's class and construct it as ``Class(options, context)``."""
        return self.component_class(kind, name)(options, context)

    def function(self, slot: str, name: str) -> Callable[..., Any]:
        """Import and return a function that its slot can call.

        Raises ContractError for a registered one that it cannot call, BadInput for a dotted path.
        """
        from drl.config.signatures import from_callable, mismatch

        entry = self.find(FUNCTION, name, slot)
        target, wrong = entry.component.target, BadInput if is_dotted(name) else ContractError
        found = _imported(entry, target)
        if isinstance(found, type) or not callable(found):
            raise wrong(f"{slot}: {target} must be a function, got {found!r}")
        try:
            reason = mismatch(slot, target, from_callable(found))
        except ValueError as error:
            raise wrong(f"{slot}: {target} has no signature to check: {error}") from error
        if reason is not None:
            raise wrong(f"{slot}: {reason}")
        function: Callable[..., Any] = found
        return function

    def _missing(self, row: Kind, name: str, slot: str | None) -> Exception:
        known = {word: owner for (kind, word), owner in known_plugins().items() if kind == row.name}
        broken = [f for f in self.failures if name in known and _same(f.distribution, known[name])]
        if broken:
            return BrokenPlugin(_unavailable(name, broken[0].owner, broken[0].reason))
        place = f" for {slot}" if slot is not None else ""
        lines = [f"no {_spoken(row.name)} named '{name}'{place} is installed"]
        installed = self.names(row.name, slot)
        meant = nearest_name(name, sorted({*installed, *known}))
        if meant not in (None, name):
            lines.append(f"did you mean '{meant}'?")
        if meant in known and meant not in installed:
            lines.append(self._how_to_get(known[meant]))
        lines.append(f"installed: {', '.join(installed) or 'none'}")
        lines.extend(
            f"{failure.owner} failed to load: {failure.reason}" for failure in self.failures
        )
        if self.failures:
            lines.append("see the whole traceback:  drl plugins doctor")
        return UnknownComponent("\n  ".join(lines))

    def _how_to_get(self, distribution: str) -> str:
        if any(_same(distribution, off) for off in self.plugins.off):
            return f"{distribution} has it, but is switched off (--without or DRL_PLUGINS_OFF)"
        return f"it ships in its own package:  pip install {distribution}"


@cache
def known_plugins() -> dict[tuple[str, str], str]:
    """Return the distribution by kind and name of every component in ``known_plugins.toml``."""
    table = tomllib.loads(Path(__file__).with_name("known_plugins.toml").read_text("utf-8"))
    return {
        (kind, name): distribution
        for kind, components in table.items()
        for name, distribution in components.items()
    }


def nearest_name(given: str, names: Sequence[str]) -> str | None:
    """Return the name that a typing mistake most likely meant, or None when none is near."""
    from rapidfuzz import fuzz, process

    found = process.extractOne(given.lower(), names, scorer=fuzz.ratio, score_cutoff=60)
    return found[0] if found else None


def _section(entry: Entry) -> str:
    return BY_NAME[entry.kind].section


def _interface_name(row: Kind) -> str:
    return row.interface.partition(":")[2]


def _spoken(kind: str) -> str:
    """A kind as a sentence says it: sde_backend is written "SDE backend"."""
    return kind.replace("sde", "SDE").replace("_", " ")


def _same(first: str, second: str) -> bool:
    return normalized(first) == normalized(second)


def _core_options(section: str) -> frozenset[str]:
    """Names of core's own options of a recipe section."""
    from drl.config import core_options

    return core_options(section)


def _two_owners(wanted: Entry, owners: Sequence[Entry]) -> str:
    """Name two owners of a name, and the one to switch off: a stranger rather than a known plugin."""
    other = next(entry for entry in owners if entry is not wanted)
    ours = {normalized(name) for name in (*known_plugins().values(), "drl-core")}
    strange = [e for e in (other, wanted) if normalized(e.distribution) not in ours]
    advice = f"switch one off: --without {(strange or [other])[0].distribution}"
    name = wanted.component.name
    if other.kind == wanted.kind:
        place = f" for {wanted.component.slot}" if wanted.component.slot is not None else ""
        return (
            f"{_spoken(wanted.kind)} '{name}'{place} is offered by {wanted.owner} and by "
            f"{other.owner}; {advice}"
        )
    return (
        f"'{name}' is {_spoken(wanted.kind)} of {wanted.owner} and {_spoken(other.kind)} of "
        f"{other.owner}, and both would have their options in [{_section(wanted)}.{name}]; {advice}"
    )


def _unavailable(name: str, owner: str, reason: str) -> str:
    distribution = owner.split(" ", maxsplit=1)[0]
    return (
        f"'{name}' is not available\n  {owner} failed to load: {reason}\n"
        f"  see the whole traceback:  drl plugins doctor {distribution}"
    )


def _imported(entry: Entry, path: str) -> Any:
    """Import ``module:attribute`` of a component; BrokenPlugin, with its cause, when that fails."""
    if entry.component.name == path:  # a recipe named it, so that there is no plugin to blame
        return imported(path)
    module_name, _, attribute = path.partition(":")
    try:
        module = importlib.import_module(module_name)
    # Foreign code, like the loader's: whatever it raises, the owner must be named.
    except (Exception, SystemExit) as error:
        reason = f"{type(error).__name__}: {error}"
        raise BrokenPlugin(_unavailable(entry.component.name, entry.owner, reason)) from error
    if attribute not in vars(module):
        reason = f"{module_name} has no {attribute}"
        raise BrokenPlugin(_unavailable(entry.component.name, entry.owner, reason))
    return vars(module)[attribute]

"""Find installed plugins and load each on its own, so that a broken one breaks nothing but itself.

pluggy's own entry-point loader raises at the first plugin that fails to import; this one records the
failure and goes on. Imports the standard library and pluggy only.
"""

from __future__ import annotations

import difflib
import os
import re
import types
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.metadata import EntryPoint, entry_points
from typing import Any, cast

import pluggy

from drl import hookspecs
from drl.api import API_VERSION
from drl.components import Component
from drl.errors import BadInput, ContractError
from drl.kinds import BY_NAME, FUNCTION, KINDS, SLOT_BY_OPTION, Kind

GROUP = "drl.plugins"
OFF_VARIABLE = "DRL_PLUGINS_OFF"

_KIND_OF_HOOK: dict[str, Kind] = {kind.hook: kind for kind in KINDS}
_NAME = re.compile(r"[a-z][a-z0-9_]*")
_IMPORT_PATH = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_]\w*")


@dataclass(frozen=True, slots=True)
class Entry:
    """A component and who offers it; ``kind`` is the name of a row of ``drl.kinds.KINDS``."""

    component: Component
    kind: str
    distribution: str
    version: str

    @property
    def owner(self) -> str:
        """Distribution and version, as messages print it."""
        return f"{self.distribution} {self.version}"


@dataclass(frozen=True, slots=True)
class Failure:
    """A plugin that could not be loaded, and why."""

    distribution: str
    version: str
    entry_point: str
    error: BaseException

    @property
    def reason(self) -> str:
        """The error in one line."""
        first = str(self.error).strip().splitlines()
        return f"{type(self.error).__name__}: {first[0]}" if first else type(self.error).__name__

    @property
    def owner(self) -> str:
        """Distribution and version, as messages print it."""
        return f"{self.distribution} {self.version}"


@dataclass(slots=True)
class Plugins:
    """What loading found: the pluggy manager, the offered components, the failures.

    ``owners``: distribution and version by the name under which pluggy knows a plugin module.
    ``off``: installed distributions that were switched off.
    """

    manager: pluggy.PluginManager
    entries: list[Entry] = field(default_factory=list)
    failures: list[Failure] = field(default_factory=list)
    owners: dict[str, tuple[str, str]] = field(default_factory=dict)
    off: tuple[str, ...] = ()

    def load(self, entry_point: EntryPoint) -> None:
        """Load one plugin; on any failure keep the reason and leave no trace of it."""
        distribution, version = owner_of(entry_point)
        name = f"{distribution}:{entry_point.name}"
        try:
            module = entry_point.load()
            check_module(module, self.manager)
            self.manager.register(module, name=name)
            self.manager.check_pending()
            entries = offered(module, self.manager, distribution, version)
        # The one broad catch in drl: a plugin is foreign code, and may even exit while it is imported.
        except (Exception, SystemExit) as error:
            if self.manager.has_plugin(name):
                self.manager.unregister(name=name)
            self.failures.append(Failure(distribution, version, entry_point.name, error))
            return
        self.entries.extend(entries)
        self.owners[name] = (distribution, version)

    def ask(self, hook: str, arguments: Mapping[str, Any]) -> list[tuple[str, Any]]:
        """Call a collected hook; return (distribution, answer) pairs without the None, sorted by name.

        For hooks whose answers must keep their owner; ``manager.hook`` serves all others.
        """
        answers = []
        for implementation in vars(self.manager.hook)[hook].get_hookimpls():
            values = [arguments[name] for name in implementation.argnames]
            try:
                answer = implementation.function(*values)
            except BaseException as error:
                self.blame(error, hook, [implementation])
                raise
            if answer is not None:
                answers.append((self.owners[implementation.plugin_name][0], answer))
        return sorted(answers, key=lambda pair: pair[0])

    def blame(
        self, error: BaseException, hook: str, implementations: Sequence[pluggy.HookImpl]
    ) -> None:
        """Note on the error which plugin's implementation of the hook raised it."""
        running = set()
        trace = error.__traceback__
        while trace is not None:
            running.add(trace.tb_frame.f_code)
            trace = trace.tb_next
        for implementation in implementations:
            function = implementation.function
            if isinstance(function, types.FunctionType) and function.__code__ in running:
                distribution, version = self.owners[implementation.plugin_name]
                error.add_note(f"raised by {distribution} {version} in its hook {hook}")


def load_plugins(off: Iterable[str] = (), installed: Iterable[EntryPoint] | None = None) -> Plugins:
    """Load every installed plugin, except the distributions in ``off`` and in ``DRL_PLUGINS_OFF``.

    ``installed`` replaces the entry points of this environment. BadInput when ``off`` names a
    distribution that has no plugin; the variable may, because it outlives what it names.
    """
    found = entry_points(group=GROUP) if installed is None else installed
    ordered = sorted(found, key=lambda point: (*owner_of(point), point.name))
    names = sorted({owner_of(point)[0] for point in ordered})
    hidden = switched_off(off, names)
    manager = pluggy.PluginManager("drl")
    manager.add_hookspecs(hookspecs)
    plugins = Plugins(manager, off=tuple(name for name in names if normalized(name) in hidden))
    for entry_point in ordered:
        if normalized(owner_of(entry_point)[0]) not in hidden:
            plugins.load(entry_point)
    manager.add_hookcall_monitoring(before=_nothing, after=_blamer(plugins))
    return plugins


def switched_off(names: Iterable[str], installed: Sequence[str]) -> frozenset[str]:
    """Return the normalized names of ``names`` and of ``DRL_PLUGINS_OFF``; BadInput for a stranger."""
    known = {normalized(name) for name in installed}
    asked = [name for name in names if name]
    for name in asked:
        if normalized(name) not in known:
            have = ", ".join(installed) or "none"
            raise BadInput(
                f"--without {name}: no distribution of that name has a plugin\n  installed: {have}"
            )
    from_variable = os.environ.get(OFF_VARIABLE, "").split(",")
    return frozenset(normalized(name.strip()) for name in [*asked, *from_variable] if name.strip())


def normalized(distribution: str) -> str:
    """Return a distribution name as package indexes compare it: ``Drl_Reward.OCR`` is drl-reward-ocr."""
    return re.sub(r"[-_.]+", "-", distribution).lower()


def owner_of(entry_point: EntryPoint) -> tuple[str, str]:
    """Return name and version of the distribution; an interrupted uninstall leaves neither."""
    distribution = entry_point.dist
    if distribution is None or not distribution.read_text("METADATA"):
        return f"unknown ({entry_point.value})", "without version"
    return distribution.name, distribution.version


def check_module(module: object, manager: pluggy.PluginManager) -> None:
    """Raise ContractError unless this is a plugin module for this interface with known hooks."""
    if not isinstance(module, types.ModuleType):
        raise ContractError("its entry point must name a module, as in 'my_package.plugin'")
    check_api(module)
    known = sorted(name for name in vars(hookspecs) if name.startswith("drl_"))
    for name, value in vars(module).items():
        is_hook = manager.parse_hookimpl_opts(module, name) is not None
        if is_hook and name not in known:
            raise ContractError(f"there is no hook '{name}'{_nearest_hook(name, known)}")
        own = isinstance(value, types.FunctionType) and value.__module__ == module.__name__
        if own and not is_hook and name in known:
            raise ContractError(f"'{name}' has the name of a hook but no @hookimpl above it")


def check_api(module: types.ModuleType) -> None:
    """Raise ContractError unless the module's ``DRL_API`` fits ``drl.api.API_VERSION``.

    It fits when the major is equal and the minor is not above ours.
    """
    stated = vars(module).get("DRL_API")
    line = f"DRL_API = {API_VERSION}"
    if stated is None:
        raise ContractError(
            f"{module.__name__} does not say which plugin interface it is for; add the line  {line}"
        )
    if not (
        isinstance(stated, tuple) and len(stated) == 2 and all(isinstance(n, int) for n in stated)
    ):
        raise ContractError(f"{module.__name__} has DRL_API = {stated!r}; write it as  {line}")
    if stated[0] != API_VERSION[0] or stated[1] > API_VERSION[1]:
        theirs, ours = (f"{major}.{minor}" for major, minor in (stated, API_VERSION))
        raise ContractError(
            f"{module.__name__} is for plugin interface {theirs}, this drl has {ours}; install a "
            f"release of the plugin for {ours}, or port it and write  {line}"
        )


def offered(
    module: types.ModuleType, manager: pluggy.PluginManager, distribution: str, version: str
) -> list[Entry]:
    """Ask one registered plugin for its components; ContractError names the one that is malformed."""
    entries: list[Entry] = []
    for caller in manager.get_hookcallers(module) or []:
        kind = _KIND_OF_HOOK.get(caller.name)
        if kind is None:
            continue
        for implementation in caller.get_hookimpls():
            if implementation.plugin is module:
                for answer in cast(Iterable[object], implementation.function()):
                    component = checked(answer, caller.name)
                    entries.append(Entry(component, kind.name, distribution, version))
    names = [(place_of(entry), entry.component.name) for entry in entries]
    for place, name in names:
        if names.count((place, name)) > 1:
            raise ContractError(f"it offers '{name}' twice for {place}")
    return entries


def place_of(entry: Entry) -> str:
    """Return where a component's name must be unique: the slot of a function, else the section."""
    return entry.component.slot or f"the section [{BY_NAME[entry.kind].section}]"


def checked(component: object, hook: str) -> Component:
    """Return a well-formed Component, raise ContractError for anything else; imports nothing."""
    if not isinstance(component, Component):
        raise ContractError(f"{hook} must answer with Component values, got {component!r}")
    name = component.name
    if not _NAME.fullmatch(name):
        raise ContractError(f"{hook}: the name {name!r} must be lower_snake, as in 'my_reward'")
    if not _IMPORT_PATH.fullmatch(component.target):
        raise ContractError(
            f"{hook}: the target {component.target!r} of '{name}' must read 'module:Class'"
        )
    if component.config is not None and not _IMPORT_PATH.fullmatch(component.config):
        raise ContractError(
            f"{hook}: the config {component.config!r} of '{name}' must read 'module:Options'"
        )
    if not component.summary.strip():
        raise ContractError(f"{hook}: '{name}' needs a summary of one sentence")
    check_slot(component, hook)
    return component


def check_slot(component: Component, hook: str) -> None:
    """Raise ContractError unless a function, and nothing else, names a slot that there is."""
    name, slot = component.name, component.slot
    if _KIND_OF_HOOK[hook].name != FUNCTION:
        if slot is not None:
            raise ContractError(
                f"{hook}: '{name}' has the slot {slot!r}; only functions have one, and they are "
                f"offered by {BY_NAME[FUNCTION].hook}"
            )
    elif slot not in SLOT_BY_OPTION:
        slots = ", ".join(SLOT_BY_OPTION)
        raise ContractError(f"{hook}: '{name}' has the slot {slot!r}; it must be one of {slots}")
    elif component.config is not None:
        raise ContractError(f"{hook}: '{name}' has a config, but functions have no options")


def _nearest_hook(name: str, known: Sequence[str]) -> str:
    close = difflib.get_close_matches(name, known, n=1)
    return f"; did you mean '{close[0]}'?" if close else "; docs/hooks.md has the list"


def _nothing(hook: str, implementations: object, arguments: object) -> None:
    """Before a hook call there is nothing to do."""


def _blamer(plugins: Plugins) -> Callable[..., None]:
    """Return what pluggy calls after each hook: it notes on an error which plugin raised it."""

    def after(
        outcome: pluggy.Result[Any],
        hook: str,
        implementations: Sequence[pluggy.HookImpl],
        arguments: Mapping[str, object],
    ) -> None:
        if outcome.exception is not None:
            plugins.blame(outcome.exception, hook, implementations)

    return after

"""A recipe while it is being resolved: merged values, problems so far, sections as they become known.

Resolution goes on after a mistake, so that all mistakes are reported at once: a value that breaks its
limits is reported and replaced by its default, its path is marked as bad, and a rule that asks for a
bad path is skipped.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from drl.config.layers import DEFAULT, Layer, Source, Tree, leaves
from drl.config.machine import Machine
from drl.errors import Problem

if TYPE_CHECKING:
    from drl.catalog import Catalog, Entry
    from drl.config.fields import Section
    from drl.options import Options


class NotKnown(Exception):
    """A rule asked for a value that is itself wrong; the rule has nothing to say."""


@dataclass(slots=True)
class Draft:
    """State of one resolution."""

    source: str
    stem: str
    layers: Sequence[Layer]
    catalog: Catalog
    machine: Machine
    tree: Tree = field(default_factory=Tree)
    problems: list[Problem] = field(default_factory=list)
    bad: set[str] = field(default_factory=set)
    sections: dict[str, Section] = field(default_factory=dict)
    tables: dict[str, dict[str, Any]] = field(default_factory=dict)
    entries: dict[tuple[str, str], Entry] = field(default_factory=dict)
    options: dict[tuple[str, str], Options | None] = field(default_factory=dict)
    origins: dict[str, str] = field(default_factory=dict)

    def problem(self, path: str, message: str, severity: str = "error") -> None:
        """Note a problem, with the place where the value was given."""
        place = path.replace("[", ".").replace("]", "")
        owner = self.tree.owner(place)
        line = None
        if owner is not None and owner.source is Source.RECIPE:
            line = owner.line(place)
        elif owner is not None:
            message = f"{message}{_place(owner, place)}"
        elif recipe := self.layer(Source.RECIPE):
            line = recipe.line(place)
        self.problems.append(Problem(path, message, severity, line))

    def error(self, path: str, message: str) -> None:
        """Note an error and mark the path as bad."""
        self.problem(path, message)
        self.bad.add(path)

    def warn(self, path: str, message: str) -> None:
        """Note a warning."""
        self.problem(path, message, severity="warning")

    def layer(self, source: Source) -> Layer | None:
        """Return the first layer of a kind."""
        return next((layer for layer in self.layers if layer.source is source), None)

    def given(self, path: str) -> bool:
        """True when a layer gave the option, so that its value is no default."""
        return path in self.tree.owners

    def changed(self, path: str) -> bool:
        """True when a layer gave one of core's options another value than its default."""
        section, _, key = path.partition(".")
        default = type(self.sections[section]).model_fields[key].default
        return self.given(path) and self.get(path) != default

    def origin(self, path: str) -> str:
        """Return where the value of an option came from."""
        tables = (o for known, o in self.tree.owners.items() if known.startswith(f"{path}."))
        owner = self.tree.owners.get(path) or next(tables, None)
        return self.origins.get(path) or (owner.origin if owner is not None else DEFAULT)

    def get(self, path: str) -> Any:
        """Return the value of one of core's options; NotKnown when what was given is wrong."""
        section, _, key = path.partition(".")
        if path in self.bad or section in self.bad:
            raise NotKnown(path)
        return vars(self.sections[section])[key]

    def get_or_none(self, path: str) -> Any:
        """Return the value of one of core's options, None when what was given is wrong."""
        with suppress(NotKnown):
            return self.get(path)
        return None

    def put(self, path: str, value: Any, origin: str) -> None:
        """Replace the value of one of core's options."""
        section, _, key = path.partition(".")
        self.sections[section] = self.sections[section].model_copy(update={key: value})
        self.origins[path] = origin

    def option(self, kind: str, name: str, key: str) -> Any:
        """Return one option of a component; NotKnown when it is wrong or does not exist."""
        options = self.options.get((kind, name))
        if options is None or key not in type(options).model_fields:
            raise NotKnown(f"{name}.{key}")
        return vars(options)[key]

    def facts(self, kind: str, path: str) -> Mapping[str, Any]:
        """Return the facts of the component that the option at ``path`` picks, or raise NotKnown."""
        entry = self.entries.get((kind, self.get(path)))
        if entry is None:
            raise NotKnown(path)
        return entry.component.facts

    def run(self, rule: Callable[[Draft], Iterator[Problem] | None]) -> None:
        """Apply a rule: a generator of problems, or a function that changes the draft."""
        with suppress(NotKnown):
            for problem in rule(self) or ():
                self.problem(problem.path, problem.message, problem.severity)

    def leaves(self) -> Iterator[tuple[str, Any]]:
        """Yield (dotted path, value) of all that the layers gave."""
        return leaves(self.tree.values)


def _place(owner: Layer, path: str) -> str:
    """Return where a value outside the recipe file was given."""
    line = owner.line(path)
    return f"   ({owner.origin}, line {line})" if line is not None else f"   ({owner.origin})"

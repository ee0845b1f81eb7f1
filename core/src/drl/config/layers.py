"""Where values come from: layers of nested tables, merged lowest first, each leaf with its layer."""

from __future__ import annotations

import enum
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

DEFAULT = "default"
AUTO = "auto"


class Source(enum.StrEnum):
    """What kind of layer it is, lowest first."""

    PLUGIN = "plugin"
    INCLUDE = "include"
    RECIPE = "recipe"
    SET = "set"
    OVERRIDE = "override"


@dataclass(frozen=True, slots=True, kw_only=True)
class Layer:
    """Values of one origin. ``base``: the folder that relative paths start at; ``lines`` by path."""

    source: Source
    origin: str
    values: Mapping[str, Any]
    base: Path
    lines: Mapping[str, int] = field(default_factory=dict)

    def line(self, path: str) -> int | None:
        """Return the line of an option, or of the nearest table around it."""
        while path:
            if path in self.lines:
                return self.lines[path]
            path = path.rpartition(".")[0]
        return None


@dataclass(slots=True)
class Tree:
    """Merged values, and the layer that each leaf came from. Lists are leaves."""

    values: dict[str, Any] = field(default_factory=dict)
    owners: dict[str, Layer] = field(default_factory=dict)

    def add(self, layer: Layer) -> list[str]:
        """Merge a layer on top; return the paths that it took from the layers below."""
        taken: list[str] = []
        self._merge(self.values, layer.values, "", layer, taken)
        return taken

    def _merge(
        self,
        target: dict[str, Any],
        values: Mapping[str, Any],
        prefix: str,
        layer: Layer,
        taken: list[str],
    ) -> None:
        for key, value in values.items():
            path = f"{prefix}{key}"
            if isinstance(value, Mapping) and value:
                if not isinstance(target.get(key), dict):
                    taken.extend(self._forget(path))
                    target[key] = {}
                self._merge(target[key], value, f"{path}.", layer, taken)
            elif isinstance(value, Mapping) and isinstance(target.get(key), dict):
                continue  # an empty table adds nothing to a filled one
            elif value is None:  # YAML's null takes back what the layers below gave
                taken.extend(self._forget(path))
                target.pop(key, None)
            else:
                taken.extend(self._forget(path))
                target[key] = value
                self.owners[path] = layer

    def _forget(self, path: str) -> list[str]:
        gone = [known for known in self.owners if known == path or known.startswith(f"{path}.")]
        for known in gone:
            del self.owners[known]
        return gone

    def owner(self, path: str) -> Layer | None:
        """Return the layer of a leaf, of what is in a table, or of the leaf around a path."""
        inside = (layer for known, layer in self.owners.items() if known.startswith(f"{path}."))
        found = self.owners.get(path) or next(inside, None)
        while found is None and path:
            path = path.rpartition(".")[0]
            found = self.owners.get(path)
        return found


def leaves(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield (dotted path, value) of everything that is not a filled table."""
    for key, value in values.items():
        path = f"{prefix}{key}"
        if isinstance(value, Mapping) and value:
            yield from leaves(value, f"{path}.")
        else:
            yield path, value


def nested(flat: Iterable[tuple[str, Any]]) -> dict[str, Any]:
    """Return tables from dotted paths; later entries win."""
    tree: dict[str, Any] = {}
    for path, value in flat:
        *tables, last = path.split(".")
        place = tree
        for name in tables:
            inner = place.get(name)
            if not isinstance(inner, dict):
                inner = place[name] = {}
            place = inner
        place[last] = value
    return tree

"""``drl config explain``: what an option or a section is, from the models that check it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from textwrap import indent
from typing import TYPE_CHECKING

from drl.components import EMPTY
from drl.config.describe import Described, described
from drl.config.flags import CORE, Known, known_keys, moved_keys, moved_text, not_available
from drl.config.messages import did_you_mean
from drl.config.sections import SECTIONS
from drl.config.signatures import call_text
from drl.errors import BadInput
from drl.kinds import FUNCTION, KINDS, SLOT_BY_OPTION
from drl.options import Options

if TYPE_CHECKING:
    from drl.catalog import Catalog, Entry


def explain(path: str, catalog: Catalog) -> str:
    """Return the explanation of an option, a component's table or a section; "" lists the sections.

    Raises BadInput for a path that nobody knows, with the nearest one.
    """
    section, _, rest = path.partition(".")
    if not path:
        return "\n".join(f"[{name}]  {_doc(name)}" for name in SECTIONS)
    name, _, key = rest.partition(".")
    coming = path in known_keys() and not known_keys()[path].available
    if section in SECTIONS and not coming:
        if not rest:
            return _section(section, catalog)
        if not key and name in SECTIONS[section].model_fields:
            return _one(path, CORE, described(SECTIONS[section]), name, _names(path, catalog))
        if (table := own_tables(section).get(name)) is not None:
            if key in table.model_fields:
                return _one(path, CORE, described(table), key)
            raise BadInput(_unknown(path, list(table.model_fields), key))
        for entry in _components(section, catalog):
            if entry.component.name == name:
                return _component(section, entry, catalog, key)
    return _not_here(path, catalog)


def own_tables(section: str) -> dict[str, type[Options]]:
    """Return core's own tables inside a section, by key."""
    fields = SECTIONS[section].model_fields
    return {
        key: field.annotation
        for key, field in fields.items()
        if isinstance(field.annotation, type) and issubclass(field.annotation, Options)
    }


def _doc(section: str) -> str:
    return (SECTIONS[section].__doc__ or "").strip().splitlines()[0]


def _components(section: str, catalog: Catalog) -> Iterator[Entry]:
    for kind in KINDS:
        if kind.section == section:
            yield from catalog.entries(kind.name)


def _section(section: str, catalog: Catalog) -> str:
    lines = [f"[{section}]  {_doc(section)}", ""]
    lines += [f"  {_line(option)}" for option in described(SECTIONS[section])]
    for kind in KINDS:
        if kind.section == section:
            lines += ["", f"  {kind.option} picks one of ({kind.plural.replace('_', ' ')}):"]
            lines += [
                f"    {entry.component.name}  {entry.component.summary}  ({entry.distribution})"
                for entry in catalog.entries(kind.name)
            ]
    for entry in catalog.entries(FUNCTION):
        if (slot := entry.component.slot or "").startswith(f"{section}."):
            component = entry.component
            lines += [
                f"  {slot} takes {component.name}  {component.summary}  ({entry.distribution})"
            ]
    return "\n".join(lines)


def _line(option: Described) -> str:
    return f"{option.key} = {option.default}  {option.help}"


def _component(section: str, entry: Entry, catalog: Catalog, key: str) -> str:
    """Explain the table of a component, or one option in it."""
    name = entry.component.name
    model = catalog.options_model(entry.kind, name)
    options = list(described(model)) if model is not None else []
    if key:
        if key not in {option.key for option in options}:
            raise BadInput(_unknown(f"{section}.{name}.{key}", [o.key for o in options], key))
        return _one(f"{section}.{name}.{key}", entry.owner, options, key)
    lines = [
        f"[{section}.{name}]  {entry.component.summary}  ({entry.owner})",
        *([f"  {_line(option)}" for option in options] or ["  it has no options"]),
    ]
    return "\n".join(lines)


def _names(path: str, catalog: Catalog) -> dict[str, str]:
    """Return what an option that names a function or a component takes; nothing for any other."""
    if path in SLOT_BY_OPTION:
        facts = {
            "type": "name of a function, or package.module:function",
            "called": call_text(path),
        }
        return facts | {"names": ", ".join(catalog.names(FUNCTION, path)) or "none is registered"}
    for kind in KINDS:
        if kind.option == path and kind.name != FUNCTION:
            names = ", ".join(catalog.names(kind.name)) or "none is installed"
            return {"type": "name of a component, or package.module:Class", "names": names}
    return {}


def _one(
    path: str,
    owner: str,
    options: Iterator[Described] | list[Described],
    key: str,
    names: Mapping[str, str] = EMPTY,
) -> str:
    option = next(option for option in options if option.key == key)
    kind = names.get("type", option.kind)
    facts = {
        **names,
        "type": f"list, each a {kind}" if names and option.kind.startswith("list") else kind,
        "default": option.default,
        "limits": option.limits,
        "owner": owner,
    }
    order = ("type", "called", "names", "default", "limits", "owner")
    table = "\n".join(f"{name:<8} {facts[name]}" for name in order if facts.get(name))
    return f"{path}\n{indent(f'{option.help}{chr(10)}{table}', '  ')}"


def _not_here(path: str, catalog: Catalog) -> str:
    """Explain an option that moved, is not available yet, or belongs to a package that is not here."""
    moved, known = moved_keys().get(path), known_keys().get(path)
    if moved is not None:
        return f"{path} {moved_text(moved)}"
    if known is not None:
        absence = _absence(known) or f"; install {known.owner}"
        return f"{path}{absence.replace(';', ':', 1)}"
    below = sorted(key for key in known_keys() if key.startswith(f"{path}."))
    if below:
        lines = [f"  {key}: {_absence(known_keys()[key]).removeprefix('; ')}" for key in below]
        return "\n".join([f"[{path}]", *lines])
    raise BadInput(_unknown(path, _all_paths(catalog), path))


def _absence(row: Known) -> str:
    return "" if row.available else f"; {not_available(row)}"


def _all_paths(catalog: Catalog) -> list[str]:
    core = [f"{name}.{key}" for name, model in SECTIONS.items() for key in model.model_fields]
    tables = [
        f"{kind.section}.{name}"
        for kind in KINDS
        if kind.name != FUNCTION
        for name in catalog.names(kind.name)
    ]
    return [*SECTIONS, *core, *tables]


def _unknown(path: str, names: list[str], given: str) -> str:
    return f"{path}: there is no such option or section{did_you_mean(given, names)}"

"""Sort what a recipe gives: core's options by section, tables of components, and what nobody knows."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from drl.config.draft import Draft
from drl.config.flags import CORE, known_keys, moved_keys, moved_text, not_available
from drl.config.layers import leaves
from drl.config.messages import did_you_mean, nearest, shown
from drl.config.sections import SECTIONS
from drl.errors import BrokenPlugin, ComponentConflict, UnknownComponent
from drl.kinds import KINDS, Kind


def sort_options(draft: Draft) -> dict[str, dict[str, Any]]:
    """Return core's own options by section and fill ``draft.tables``; report what nobody knows.

    ``draft.tables`` gets each sub-table by its dotted path, known or not.
    """
    core: dict[str, dict[str, Any]] = {name: {} for name in SECTIONS}
    for section, table in draft.tree.values.items():
        if section not in SECTIONS:
            _report_section(draft, section, table)
        elif not isinstance(table, dict):
            draft.error(section, f"must be a table of options, got {shown(table)}")
        else:
            core[section] = dict(_core_of_section(draft, section, table))
    return core


def _core_of_section(
    draft: Draft, section: str, table: Mapping[str, Any]
) -> Iterator[tuple[str, Any]]:
    for key, value in table.items():
        path = f"{section}.{key}"
        if key in SECTIONS[section].model_fields:
            yield key, value
        elif isinstance(value, dict):
            draft.tables[path] = value
        else:
            draft.error(path, unknown_option(draft, path, value))


def _report_section(draft: Draft, section: str, table: Any) -> None:
    """Report a section that core does not have, or not yet."""
    later = {key.split(".", maxsplit=1)[0] for key in known_keys()} - set(SECTIONS)
    if not isinstance(table, dict):
        same = [key for key in known_keys() if key.endswith(f".{section}") and key.count(".") == 1]
        hint = f"; did you mean '{same[0]}'?" if same else ""
        draft.error(section, f"stands outside of any section{hint}")
    elif section not in later:
        draft.error(section, f"unknown section{did_you_mean(section, sorted(SECTIONS))}")
    elif not table:
        row = next(row for key, row in known_keys().items() if key.startswith(f"{section}."))
        draft.error(section, not_available(row).replace("option", "section"))
    else:
        for path, value in leaves(table, f"{section}."):
            draft.error(path, unknown_option(draft, path, value))


def unknown_option(draft: Draft, path: str, value: Any) -> str:
    """Say why an option is refused: moved, not available, of another section, or never heard of."""
    moved, known = moved_keys().get(path), known_keys().get(path)
    if moved is not None:
        return moved_text(moved)
    if known is not None and not known.available:
        return not_available(known)
    section, _, key = path.rpartition(".")
    names = [name.rpartition(".")[2] for name in options_below(draft, section)]
    near = nearest(key, names)
    if near is not None:
        draft.bad.add(f"{section}.{near}")  # it is what was meant: nothing follows from its default
        return f"unknown option; did you mean '{near}'?"
    available = [name for name, row in known_keys().items() if row.available]
    elsewhere = [name for name in available if name.endswith(f".{key}")]
    return f"unknown option{f'; did you mean {elsewhere[0]!r}?' if elsewhere else ''}"


def options_below(draft: Draft, section: str) -> list[str]:
    """Return the dotted paths of all that may stand directly in a table of the recipe."""
    top, _, name = section.partition(".")
    if top not in SECTIONS:
        return []
    if not name:
        components = [n for kind in kinds_of(top) for n in draft.catalog.names(kind.name)]
        return [f"{section}.{key}" for key in (*SECTIONS[top].model_fields, *components)]
    models = [type(options) for (_, n), options in draft.options.items() if n == name and options]
    return [f"{section}.{key}" for model in models for key in model.model_fields]


def kinds_of(section: str) -> list[Kind]:
    """Return the kinds whose options stand in a section."""
    return [kind for kind in KINDS if kind.section == section]


def report_stray_table(draft: Draft, path: str, table: Mapping[str, Any]) -> None:
    """Report a sub-table that belongs to no installed component: by its plugin where that is known."""
    section, _, name = path.partition(".")
    message = _uninstalled(draft, section, name)
    if message is not None:
        draft.error(path, message)
        return
    rows = [row for key, row in known_keys().items() if f"{key}.".startswith(f"{path}.")]
    if rows and not table:
        draft.error(path, not_available(rows[0]))
    elif rows:
        for leaf, value in leaves(table, f"{path}."):
            draft.error(leaf, _of_unavailable_plugin(draft, leaf, value, rows[0].owner))
    else:
        draft.error(path, unknown_option(draft, path, table))


def _of_unavailable_plugin(draft: Draft, leaf: str, value: Any, owner: str) -> str:
    """Answer an option of a plugin that does not exist yet, also inside a pass-through table."""
    passed = [row for key, row in known_keys().items() if leaf.startswith(f"{key}.")]
    if passed:
        return not_available(passed[0])
    message = unknown_option(draft, leaf, value)
    unheard = message.startswith("unknown") and owner != CORE
    return f"{message} ({owner} is not available in this release)" if unheard else message


def _uninstalled(draft: Draft, section: str, name: str) -> str | None:
    """Return the catalog's answer for a component that a known package would bring, or None."""
    from drl.catalog import known_plugins

    for kind in kinds_of(section):
        if (kind.name, name) in known_plugins():
            try:
                draft.catalog.find(kind.name, name)
            except (UnknownComponent, BrokenPlugin, ComponentConflict) as error:
                return without_path(str(error), kind.option)
    return None


def without_path(message: str, path: str) -> str:
    """Return a catalog's message without the recipe path in front of it, unindented."""
    text = message.removeprefix(f"{path}: ")
    return "\n".join(line.removeprefix("  ") for line in text.splitlines())

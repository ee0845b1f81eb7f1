"""Static checks of one component: what ``drl plugins doctor`` and ``PluginContract`` look at."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from drl.catalog import Catalog
from drl.plugins import Entry

if TYPE_CHECKING:
    from drl.options import Options

_INNER_END = re.compile(r"[.!?]\s+[A-Z]")


def complaints(catalog: Catalog, entry: Entry) -> list[str]:
    """Import a component's class and option model, or a function, and return what is wrong with them.

    BrokenPlugin, ContractError and ComponentConflict pass through: they say that there is nothing to
    look at.
    """
    if entry.component.slot is not None:
        catalog.function(entry.component.slot, entry.component.name)
        return summary_complaints(entry.component.summary)
    catalog.component_class(entry.kind, entry.component.name)
    model = catalog.options_model(entry.kind, entry.component.name)
    found = summary_complaints(entry.component.summary)
    return found if model is None else found + option_complaints(model)


def summary_complaints(summary: str) -> list[str]:
    """Return what keeps a summary from being one sentence on one line."""
    if not summary.endswith("."):
        return [f"the summary must end with a full stop: {summary!r}"]
    if "\n" in summary or _INNER_END.search(summary):
        return [f"the summary must be one sentence: {summary!r}"]
    return []


def option_complaints(model: type[Options]) -> list[str]:
    """Return the fields without help, and the defaults that break their own limits."""
    from pydantic import ValidationError

    found = [
        f"option {name} has no description"
        for name, field in model.model_fields.items()
        if not field.description
    ]
    try:
        model()
    except ValidationError as error:
        found.extend(
            f"the default of option {'.'.join(map(str, problem['loc']))}: {problem['msg']}"
            for problem in error.errors()
            if problem["type"] != "missing"  # a required option has no default
        )
    return found

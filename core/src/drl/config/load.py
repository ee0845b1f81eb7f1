"""``load_recipe``: layers, checks, components, automatic values and rules, in this order."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from drl.config.automatic import resolve_automatic
from drl.config.claim import claim_family, place_checkpoint, place_encoders
from drl.config.components import find_components
from drl.config.data_choice import choose_source, with_evaluation_file
from drl.config.draft import Draft
from drl.config.files import read_override, read_recipe
from drl.config.hooks import ask_for_defaults, ask_for_problems
from drl.config.layers import Layer, Source, leaves
from drl.config.machine import Machine, detect
from drl.config.recipe import Recipe, as_plain
from drl.config.rules import RULES
from drl.config.sections import SECTIONS
from drl.config.settings import set_layers
from drl.config.structure import sort_options
from drl.config.validation import checked
from drl.errors import Problem, RecipeError
from drl.kinds import BY_NAME
from drl.options import Options

if TYPE_CHECKING:
    from drl.catalog import Catalog


def load_recipe(
    path: Path | str,
    *,
    sets: Sequence[str] = (),
    override: Path | str | None = None,
    catalog: Catalog,
    machine: Machine | None = None,
) -> Recipe:
    """Return the recipe of a file, with ``--set`` values and an override file on top.

    Imports plugin modules and their option models, neither torch nor a component. Raises RecipeError
    with every problem. ``machine`` is found when not given.
    """
    file = Path(path)
    layers = read_recipe(file)
    settings, problems = set_layers(sets)
    layers += settings
    if override is not None:
        layers.append(read_override(Path(override)))
    layers, mistakes = with_evaluation_file(layers)
    problems = [*problems, *mistakes]
    found = machine if machine is not None else detect()
    draft = resolve(file, layers, problems, catalog, found)
    defaults, disagreements = ask_for_defaults(draft)
    if defaults:
        problems = [*problems, *disagreements]
        draft = resolve(file, [*defaults, *layers], problems, catalog, found)
    for rule in RULES:
        draft.run(rule)
    ask_for_problems(draft)
    return finished(draft, file)


def resolve(
    file: Path,
    layers: Sequence[Layer],
    problems: Sequence[Problem],
    catalog: Catalog,
    machine: Machine,
) -> Draft:
    """Merge layers and check every value by itself; the draft holds what is wrong."""
    draft = Draft(file.name, file.stem, layers, catalog, machine, problems=list(problems))
    for layer in layers:
        taken = draft.tree.add(layer)
        if layer.source is Source.OVERRIDE:
            for option in taken:
                draft.warn(option, f"the override file {layer.origin} wins")
    core = sort_options(draft)
    for name, model in SECTIONS.items():
        draft.sections[name] = checked(draft, model, core[name], name)
    draft.run(place_checkpoint)
    draft.run(place_encoders)
    draft.run(claim_family)
    draft.run(choose_source)
    find_components(draft)
    resolve_automatic(draft)
    return draft


def finished(draft: Draft, file: Path) -> Recipe:
    """Return the recipe of a draft, or raise RecipeError with its errors and warnings."""
    errors = [problem for problem in draft.problems if problem.severity == "error"]
    warnings = [problem for problem in draft.problems if problem.severity != "error"]
    if errors:
        in_order = sorted(errors, key=lambda problem: (problem.line is None, problem.line or 0))
        raise RecipeError(draft.source, tuple(in_order))
    sections: Mapping[str, Any] = draft.sections
    return Recipe(
        source=draft.source,
        path=file,
        **sections,
        tables=dict(draft.options),
        origins=origins_of(draft),
        warnings=tuple(warnings),
        catalog=draft.catalog,
    )


def option_paths(options: Options, prefix: str) -> Iterator[str]:
    """Yield the dotted paths of a section's options, those of a table of its own one by one."""
    for key, value in vars(options).items():
        path = f"{prefix}.{key}"
        if isinstance(value, Options):
            yield from option_paths(value, path)
        else:
            yield path


def origins_of(draft: Draft) -> dict[str, str]:
    """Return the origin of every value by dotted path, in the order of the sections."""
    origins: dict[str, str] = {}
    for name, section in draft.sections.items():
        origins |= {path: draft.origin(path) for path in option_paths(section, name)}
        for (kind, table), options in sorted(draft.options.items()):
            if options is not None and BY_NAME[kind].section == name:
                paths = [f"{name}.{table}.{key}" for key, _ in leaves(as_plain(options))]
                origins |= {path: draft.origin(path) for path in paths}
    return origins

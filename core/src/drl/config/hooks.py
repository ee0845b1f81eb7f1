"""Ask plugins: for defaults below the recipe file, and for problems across sections."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from drl.config.draft import Draft, NotKnown
from drl.config.layers import Layer, Source, leaves, nested
from drl.config.recipe import Recipe
from drl.errors import Problem
from drl.kinds import BY_NAME


class Guarded:
    """A section or option table with wrong values in it: reading one of these raises NotKnown."""

    def __init__(self, inner: Any, wrong: frozenset[str]) -> None:
        self._inner = inner
        self._wrong = wrong

    def __getattr__(self, name: str) -> Any:
        if name in self._wrong:
            raise NotKnown(name)
        return self._inner.__getattribute__(name)


class GuardedRecipe(Recipe):
    """What hooks see of a recipe that has mistakes."""

    __slots__ = ()

    def options(self, kind: str, name: str) -> Any:
        """Return the options of a component; NotKnown when they cannot be read."""
        options = super().options(kind, name)
        if options is None and (kind, name) in self.tables:
            model = self.catalog.options_model(kind, name)
            if model is not None:
                raise NotKnown(name)
        return options


def recipe_for_hooks(draft: Draft) -> Recipe:
    """Return the draft as a recipe whose wrong values cannot be read."""
    sections = {name: _guarded(draft, name, section) for name, section in draft.sections.items()}
    tables = {
        (kind, name): _guarded(draft, f"{BY_NAME[kind].section}.{name}", options)
        for (kind, name), options in draft.options.items()
    }
    return GuardedRecipe(
        source=draft.source,
        path=Path(draft.source),
        **sections,
        tables=tables,
        origins={},
        catalog=draft.catalog,
    )


def _guarded(draft: Draft, path: str, options: Any) -> Any:
    start = f"{path}."
    wrong = frozenset(bad.removeprefix(start) for bad in draft.bad if bad.startswith(start))
    return Guarded(options, wrong) if wrong and options is not None else options


def ask(draft: Draft, hook: str, recipe: Recipe) -> list[tuple[str, Any]]:
    """Return (distribution, answer) of every plugin that could answer about this recipe.

    A plugin that reads a value which is itself wrong is skipped.
    """
    answers: list[tuple[str, Any]] = []
    for implementation in vars(draft.catalog.hooks)[hook].get_hookimpls():
        arguments = [recipe for _ in implementation.argnames]
        distribution = str(implementation.plugin_name).partition(":")[0]
        with suppress(NotKnown):
            try:
                answer = implementation.function(*arguments)
                # a generator runs here, where its plugin is known
                complete = dict(answer) if isinstance(answer, Mapping) else list(answer or ())
            except NotKnown:
                raise
            except Exception as error:
                error.add_note(f"raised by {distribution} in the hook {hook}")
                raise
            answers.append((distribution, complete))
    return sorted(answers, key=lambda pair: pair[0])


def ask_for_defaults(draft: Draft) -> tuple[list[Layer], list[Problem]]:
    """Return a layer per plugin that suggests values, and what they disagree about.

    Only the plugins of chosen components are heard.
    """
    if not vars(draft.catalog.hooks)["drl_default_options"].get_hookimpls():
        return [], []
    chosen = {entry.distribution for entry in draft.entries.values()}
    first: dict[str, tuple[str, Any]] = {}
    layers, problems = [], []
    for distribution, answer in ask(draft, "drl_default_options", recipe_for_hooks(draft)):
        if distribution not in chosen or not answer:
            continue
        for path, value in leaves(nested(answer.items())):
            other, theirs = first.setdefault(path, (distribution, value))
            if theirs != value and not draft.given(path):
                message = (
                    f"{other} and {distribution} suggest different values; set it in the recipe"
                )
                problems.append(Problem(path, message))
        layers.append(_suggestion(distribution, answer))
    return layers, problems


def _suggestion(distribution: str, answer: Mapping[str, Any]) -> Layer:
    return Layer(
        source=Source.PLUGIN,
        origin=f"plugin {distribution}",
        values=nested(answer.items()),
        base=Path.cwd(),
    )


def ask_for_problems(draft: Draft) -> None:
    """Add what plugins find wrong with the recipe."""
    recipe = recipe_for_hooks(draft)
    for _, answer in ask(draft, "drl_check_recipe", recipe):
        for problem in answer:
            if isinstance(problem, Problem) and problem.path not in draft.bad:
                draft.problem(problem.path, problem.message, problem.severity)

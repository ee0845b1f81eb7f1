"""From a recipe to a ``Run``: find every component, build it, connect it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from drl.catalog import Catalog
from drl.cluster.background import Background
from drl.cluster.engines import InlineEngines
from drl.cluster.rewards import InlineRewards, Term, TermSpec
from drl.errors import BadInput, RecipeError
from drl.interfaces.engine import Launch
from drl.interfaces.updater import SyncPlan, Updater
from drl.lora import uniform_adapters
from drl.model.build import Component
from drl.observe.timing import Phases
from drl.run import Run
from drl.stages.evaluate import EvaluationSet
from drl.trainers import (
    Maker,
    rank_context,
    rank_settings,
    sde_backends,
    start_trainer,
)
from drl.types import Need, Role

if TYPE_CHECKING:
    from drl.interfaces.family import Family
    from drl.interfaces.loss import Loss
    from drl.interfaces.steps import StepStrategy
    from drl.observe.directory import RunDirectory

PREFERENCE = {"lora": 0, "dense": 1, "merged": 2}
"""Order in which ``sync.updater = "auto"`` asks: the least bytes first."""


def assemble(recipe: Any, catalog: Catalog, directory: RunDirectory, background: Background) -> Run:
    """Build a run. Raises BadInput for what can only be seen once components exist."""
    settings = rank_settings(recipe)
    context = rank_context(recipe, directory.path, settings, 0)
    make = Maker(recipe, catalog, context)
    family: Family = make("family", recipe.model.family, "model")
    problems = tuple(family.check(recipe))
    if problems:
        raise RecipeError(recipe.source, problems)
    loss: Loss = make("loss", recipe.algorithm.loss, "algorithm", Role.TRAIN)
    needs_rollout = Need.ROLLOUT in loss.needs
    trainer, components = start_trainer(make, family, loss, settings)
    try:
        engines = build_engines(make, recipe, background) if needs_rollout else None
        if engines is not None:
            trainer.use_updater(choose_updater(make, recipe, components, engines))
        return Run(
            recipe=recipe,
            catalog=catalog,
            directory=directory,
            background=background,
            phases=Phases(),
            context=context,
            family=family,
            pipeline=family.pipeline(recipe.model.checkpoint, context),
            loss=loss,
            components=components,
            trainer=trainer,
            source=make("data_source", recipe.data.source, "data"),
            engines=engines,
            rewards=build_rewards(make, recipe) if needs_rollout else InlineRewards([]),
            advantage=estimator(make, recipe) if needs_rollout else None,
            strategy=build_strategy(make, recipe) if needs_rollout else None,
            loggers=[make("logger", name, "logging") for name in recipe.logging.loggers],
            evaluation_sets=evaluation_sets(make, recipe) if needs_rollout else (),
            ranks=settings.world,
        )
    except BaseException:
        trainer.close()  # nobody else knows of its processes yet
        raise


def build_strategy(make: Maker, recipe: Any) -> StepStrategy | None:
    """Return the step strategy; its random choices belong to the rollout's seed."""
    name = recipe.sde.step_strategy
    if name is None:
        return None
    options = recipe.options("step_strategy", name)
    context = replace(make.at("sde"), seed=recipe.rollout.seed)
    strategy: StepStrategy = make.catalog.create("step_strategy", name, options, context)
    return strategy


def estimator(make: Maker, recipe: Any) -> Any:
    """Return the advantage estimator."""
    return make("advantage", recipe.algorithm.advantage_estimator, "algorithm")


def build_engines(make: Maker, recipe: Any, background: Background) -> InlineEngines:
    """Return the pool of the one embedded engine, not started."""
    name = recipe.rollout.engine
    return InlineEngines(name, make("engine", name, "rollout", Role.ROLLOUT), background)


def launch_of(run: Run) -> Launch:
    """Return what the engine of a run is started with."""
    recipe = run.recipe
    adapters = {
        name: component.lora.target_modules
        for name, component in run.components.items()
        if component.lora is not None and isinstance(component.lora.target_modules, tuple)
    }
    return Launch(
        checkpoint=recipe.model.checkpoint,
        family=run.family,
        sde_backends=sde_backends(Maker(recipe, run.catalog, run.context), recipe),
        components=tuple(recipe.model.components),
        device=run.context.device,
        dtype=recipe.train.forward_dtype,
        lora_targets=adapters,
    )


def choose_updater(
    make: Maker, recipe: Any, components: Mapping[str, Component], engines: InlineEngines
) -> str:
    """Return the name of ``sync.updater``, or of the first updater that accepts the plan."""
    plan = SyncPlan(
        trained="adapters" if recipe.lora.enabled else "full",
        placement="same_process",
        components=tuple(components),
        uniform_adapters=all(
            uniform_adapters(component.module)
            for component in components.values()
            if component.lora is not None
        ),
        engines=(engines.engine.capabilities(),),
    )
    wanted: str = recipe.sync.updater
    if wanted != "auto":
        updater: Updater = make("updater", wanted, "sync")
        reason = updater.accepts(plan)
        if reason:
            raise BadInput(f"sync.updater = '{wanted}' does not fit this run: {reason}")
        return wanted
    found = {name: make("updater", name, "sync") for name in make.catalog.names("updater")}
    order = sorted(found, key=lambda name: PREFERENCE.get(found[name].payload, len(PREFERENCE)))
    reasons = {name: found[name].accepts(plan) for name in order}
    for name in order:
        if reasons[name] is None:
            return name
    raise BadInput(
        f"sync.updater = 'auto': no installed updater fits this run: {reasons}\n"
        "install one that does (drl plugins list --kind updater)"
    )


def build_rewards(make: Maker, recipe: Any) -> InlineRewards:
    """Return the reward terms of the recipe, not started."""
    off = tuple(make.catalog.plugins.off)
    return InlineRewards([_term(make, recipe, term, off) for term in recipe.reward.all_terms])


def _term(make: Maker, recipe: Any, term: Any, off: Sequence[str]) -> Term:
    options = recipe.term_options(term.name)
    context = make.at("reward", Role.REWARD)
    reward = make.catalog.create("reward", term.component, options, context)
    plain = None if options is None else options.model_dump()
    # the section stays here: a worker gets plain values only
    spec = TermSpec(
        plugin=term.component, options=plain, context=replace(context, section=None), off=tuple(off)
    )
    return Term(term.name, term.weight, reward, spec)


def evaluation_sets(make: Maker, recipe: Any) -> list[EvaluationSet]:
    """Read every evaluation data set completely."""
    sets = []
    for entry in recipe.eval.datasets:
        section = recipe.data.model_copy(
            update={
                "prompt_data": entry.path,
                "input_key": recipe.eval.input_key or recipe.data.input_key,
            }
        )
        model = make.catalog.options_model("data_source", "jsonl")
        options = None if model is None else model()
        context = replace(make.context, section=section)
        source = make.catalog.create("data_source", "jsonl", options, context)
        sets.append(EvaluationSet(name=entry.name, prompts=tuple(source.take(source.rows()))))
    return sets

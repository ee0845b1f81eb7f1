"""From a recipe to a ``Run``: find every component, build it, connect it. Starts nothing."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

from drl.cluster.background import Background
from drl.cluster.engines import InlineEngines
from drl.cluster.rewards import InlineRewards, Term, TermSpec
from drl.errors import BadInput, RecipeError
from drl.interfaces.engine import Launch
from drl.interfaces.updater import SyncPlan, Updater
from drl.model.build import (
    Component,
    build_components,
    build_optimizer,
    build_schedule,
)
from drl.model.trainer import StepSettings, Trainer
from drl.observe.timing import Phases
from drl.run import Run
from drl.stages.evaluate import EvaluationSet
from drl.stages.loss import Forward
from drl.stages.pairs import batch_plan
from drl.types import Context, Guidance, Need, Role, StepContext

if TYPE_CHECKING:
    from drl.catalog import Catalog
    from drl.interfaces.family import Family
    from drl.interfaces.loss import Loss
    from drl.interfaces.steps import SdeBackend, StepStrategy
    from drl.observe.directory import RunDirectory

PREFERENCE = {"lora": 0, "dense": 1, "merged": 2}
"""Order in which ``sync.updater = "auto"`` asks: the least bytes first."""


def assemble(recipe: Any, catalog: Catalog, directory: RunDirectory, background: Background) -> Run:
    """Build a run. Raises BadInput for what can only be seen once components exist."""
    context = Context(
        device=recipe.cluster.device,
        dtype=recipe.train.forward_dtype,
        run_dir=directory.path,
        seed=recipe.train.seed,
    )
    make = Maker(recipe, catalog, context)
    family: Family = make("family", recipe.model.family, "model")
    problems = tuple(family.check(recipe))
    if problems:
        raise RecipeError(recipe.source, problems)
    loss: Loss = make("loss", recipe.algorithm.loss, "algorithm", Role.TRAIN)
    needs_rollout = Need.ROLLOUT in loss.needs
    backends = sde_backends(make, recipe) if needs_rollout else {}
    components = build_components(recipe, family, context)
    engines = build_engines(make, recipe, background) if needs_rollout else None
    trainer = build_trainer(recipe, context, family, loss, backends, components)
    if engines is not None:
        trainer.updater = choose_updater(make, recipe, components, engines)
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
    )


class Maker:
    """Creates components: options from the recipe, context with their section."""

    def __init__(self, recipe: Any, catalog: Catalog, context: Context) -> None:
        self.recipe = recipe
        self.catalog = catalog
        self.context = context

    def __call__(self, kind: str, name: str, section: str, role: Role = Role.DRIVER) -> Any:
        """Create the component of this kind and name."""
        options = self.recipe.options(kind, name)
        return self.catalog.create(kind, name, options, self.at(section, role))

    def at(self, section: str, role: Role = Role.DRIVER) -> Context:
        """Return the context of a component that is chosen in this section."""
        return replace(self.context, role=role, section=self.recipe.section(section))


def sde_backends(make: Maker, recipe: Any) -> dict[str, SdeBackend]:
    """Return the backends of the stochastic and of the deterministic steps."""
    names = dict.fromkeys([recipe.sde.type, "ode"])
    return {name: make("sde_backend", name, "sde") for name in names}


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


def build_trainer(
    recipe: Any,
    context: Context,
    family: Family,
    loss: Loss,
    backends: Mapping[str, SdeBackend],
    components: Mapping[str, Component],
) -> Trainer:
    """Return the trainer of this process, without an updater."""
    modules = {name: component.module for name, component in components.items()}
    first = next(iter(components.values()))
    reference = Need.REFERENCE in loss.needs
    if reference and recipe.algorithm.ref_mode != "lora_base":
        raise BadInput(
            f"algorithm.ref_mode = '{recipe.algorithm.ref_mode}', but {recipe.algorithm.loss} needs a "
            "reference; use 'lora_base' with lora.enabled = true"
        )
    joint = first.config.joint_guidance
    sampling = recipe.sampling
    forward = Forward(
        family=family,
        models=modules,
        loss=loss,
        backend=backends.get(recipe.sde.type),
        device=torch.device(context.device),
        dtype=recipe.train.forward_dtype,
        input_dtypes=first.config.input_dtypes,
        guidance={
            "guidance_scale": Guidance(
                scale=sampling.guidance_scale, true_scale=sampling.true_cfg_scale, joint=joint
            )
        },
        reference=reference,
    )
    settings = StepSettings(
        schedule=build_schedule(recipe, batch_plan(recipe).optimizer_steps),
        clip_grad=recipe.optimizer.clip_grad,
        max_bad_steps=recipe.trust.max_bad_steps,
        buffer_bytes=recipe.sync.buffer_size,
    )
    return Trainer(
        forward=forward,
        optimizer=build_optimizer(recipe, modules),
        settings=settings,
        context=StepContext.within(context, section=recipe.algorithm),
        updater=None,
    )


def choose_updater(
    make: Maker, recipe: Any, components: Mapping[str, Component], engines: InlineEngines
) -> Updater:
    """Return the updater of ``sync.updater``, or the first that accepts the plan."""
    plan = SyncPlan(
        trained="adapters" if recipe.lora.enabled else "full",
        placement="same_process",
        components=tuple(components),
        engines=(engines.engine.capabilities(),),
    )
    wanted = recipe.sync.updater
    if wanted != "auto":
        updater: Updater = make("updater", wanted, "sync")
        reason = updater.accepts(plan)
        if reason:
            raise BadInput(f"sync.updater = '{wanted}' does not fit this run: {reason}")
        return updater
    found = [make("updater", name, "sync") for name in make.catalog.names("updater")]
    found.sort(key=lambda candidate: PREFERENCE.get(candidate.payload, len(PREFERENCE)))
    reasons = {type(candidate).__name__: candidate.accepts(plan) for candidate in found}
    for candidate in found:
        if reasons[type(candidate).__name__] is None:
            chosen: Updater = candidate
            return chosen
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

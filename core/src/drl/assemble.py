"""From a recipe to a ``Run``: find every component, build it, connect it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from drl.catalog import Catalog
from drl.cluster.background import Background
from drl.cluster.encoders import InlineEncoders
from drl.cluster.engines import InlineEngines
from drl.cluster.rewards import (
    FunctionRewards,
    InlineRewards,
    Term,
    TermSpec,
    row_type,
    unknown_type,
)
from drl.config.sections import RewardTerm
from drl.errors import BadInput, RecipeError
from drl.interfaces.engine import Engine, Launch, ServerSettings
from drl.interfaces.updater import SyncPlan, Updater
from drl.lora import lora_layers, uniform_adapters
from drl.model.build import Component
from drl.model.devices import check_device
from drl.model.prepare import parameter_dtypes
from drl.observe.memory import phase_memory
from drl.observe.timing import Phases
from drl.run import Run
from drl.stages.evaluate import EvaluationSet
from drl.stages.filters import use_buffer_filter
from drl.stages.own_function import check_evaluates
from drl.stages.residence import offloads_rollout, residence_of, shared_with_engine
from drl.trainers import (
    Maker,
    build_loss,
    check_guidance,
    guidance_is_batched,
    rank_context,
    rank_settings,
    sde_backends,
    start_idle_trainer,
    start_trainer,
    trains_nothing,
)
from drl.types import Need, Prompt, Role

if TYPE_CHECKING:
    from drl.cluster.ranks import RankedTrainer
    from drl.interfaces.family import Family
    from drl.interfaces.steps import StepStrategy
    from drl.model.idle import Idle
    from drl.model.trainer import Trainer
    from drl.observe.directory import RunDirectory

PREFERENCE = {"lora": 0, "dense": 1, "merged": 2}
"""Order in which ``sync.updater = "auto"`` asks: the least bytes first."""


def assemble(recipe: Any, catalog: Catalog, directory: RunDirectory, background: Background) -> Run:
    """Build a run. Raises BadInput for what can only be seen once components exist."""
    check_device("cluster.device", recipe.cluster.device)
    check_device("sampling.generator_device", recipe.sampling.generator_device)
    settings = rank_settings(recipe)
    context = rank_context(recipe, directory.path, settings, 0)
    make = Maker(recipe, catalog, context)
    make.functions.load_all()
    family: Family = make("family", recipe.model.family, "model")
    problems = tuple(family.check(recipe))
    if problems:
        raise RecipeError(recipe.source, problems)
    check_guidance(recipe, family)
    loss = build_loss(make)
    needs_rollout = Need.ROLLOUT in loss.needs
    generates = needs_rollout and recipe.debug.load_rollout_data is None
    trainer: Trainer | RankedTrainer | Idle
    if trains_nothing(recipe):
        trainer, components = start_idle_trainer(make, family, loss, settings)
    else:
        trainer, components = start_trainer(make, family, loss, settings)
    try:
        engines = build_engines(make, recipe, background) if generates else None
        if engines is not None and components:
            trainer.use_updater(choose_updater(make, recipe, components, engines))
        source = make("data_source", recipe.data.source, "data")
        sets = evaluation_sets(make, recipe) if generates else []
        prompts = [*source.known_prompts(), *(prompt for one in sets for prompt in one.prompts)]
        rewards = build_rewards(make, recipe, prompts) if needs_rollout else InlineRewards([])
        run = Run(
            recipe=recipe,
            catalog=catalog,
            functions=make.functions,
            directory=directory,
            background=background,
            phases=Phases(memory=phase_memory(context.device)),
            context=context,
            family=family,
            pipeline=family.pipeline(recipe.model.checkpoint, context),
            loss=loss,
            components=components,
            trainer=trainer,
            source=source,
            engines=engines,
            rewards=rewards,
            advantage=estimator(make, recipe) if needs_rollout else None,
            strategy=build_strategy(make, recipe) if generates else None,
            loggers=[make("logger", name, "logging") for name in recipe.logging.loggers],
            evaluation_sets=sets,
            encoders=InlineEncoders(recipe, catalog, context),
            ranks=settings.world,
            residence=residence_of(recipe),
        )
        use_buffer_filter(run)
        check_evaluates(run)
        return run
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
    engine: Engine = make("engine", name, "rollout", Role.ROLLOUT)
    able = engine.capabilities()
    if able.sde_types and recipe.sde.type not in able.sde_types:
        raise BadInput(
            f"sde.type: engine '{name}' cannot sample with '{recipe.sde.type}'; it has "
            f"{', '.join(sorted(able.sde_types))}"
        )
    if recipe.debug.engine_debug and not able.debug_tensors:
        raise BadInput(
            f"debug.engine_debug: engine '{name}' does not return its tensors; set it to false"
        )
    if offloads_rollout(recipe) and not able.sleeps:
        raise BadInput(
            f"cluster.offload_rollout: engine '{name}' cannot give its memory back; set it to false"
        )
    return InlineEngines(name, engine, background, recipe.rollout.server_concurrency)


def launch_of(run: Run) -> Launch:
    """Return what the engine of a run is started with."""
    recipe = run.recipe
    adapters = {
        name: tuple(lora_layers(component.module))
        for name, component in run.components.items()
        if component.lora is not None and run.trainer.payload == "lora"
    }
    return Launch(
        checkpoint=recipe.model.checkpoint,
        family=run.family,
        sde_backends=sde_backends(Maker(recipe, run.catalog, run.context), recipe),
        components=tuple(recipe.model.components),
        device=run.context.device,
        dtype=recipe.train.forward_dtype,
        lora_targets=adapters,
        server=server_settings(recipe, run.catalog),
        shared=shared_with_engine(run),
        batched_guidance=guidance_is_batched(recipe, run.family),
        prompts=known_texts(run),
        attention_backend=recipe.train.attention_backend,
        parameter_dtypes=engine_dtypes(run),
        pushes=run.trainer.payload is not None,
    )


def engine_dtypes(run: Run) -> dict[str, dict[str, str]]:
    """Return, per component, the globs of parameters that an engine computes in a dtype of their own."""
    recipe, family = run.recipe, run.family
    found = {}
    for name in recipe.model.components:
        config = family.pipeline_config(
            name, family.component_config(name, recipe.model.checkpoint)
        )
        globs = parameter_dtypes(recipe, config)
        if globs:
            found[name] = globs
    return found


def known_texts(run: Run) -> tuple[str, ...]:
    """Return the texts that are known to come, each once: prompts of data and evaluation, the negative one."""
    sets = [prompt for one in run.evaluation_sets for prompt in one.prompts]
    texts = [prompt.text for prompt in (*run.source.known_prompts(), *sets)]
    negative = run.recipe.sampling.negative_prompt
    return tuple(dict.fromkeys(texts if negative is None else [*texts, negative]))


def server_settings(recipe: Any, catalog: Catalog) -> ServerSettings | None:
    """Return how requests reach the engine of a recipe; None when it runs in this process."""
    rollout = recipe.rollout
    if not catalog.find("engine", rollout.engine).component.facts.get("served", False):
        return None
    # without a limit of its own the router lets through what the pool does: here that of one engine
    connections = rollout.router_max_connections or rollout.server_concurrency
    return ServerSettings(
        router_max_connections=connections,
        router_timeout_s=rollout.router_timeout,
        router_failure_threshold=rollout.router_failure_threshold,
        distributed_post=rollout.distributed_post,
        parser_workers=rollout.parser_num_workers,
        patch_groups=rollout.patch_groups or (),
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


def build_rewards(make: Maker, recipe: Any, prompts: Sequence[Prompt]) -> InlineRewards:
    """Return the reward terms of the recipe and those that rows of the data ask for, not started.

    Raises BadInput for a row whose ``metadata.rm_type`` is no installed reward.
    """
    if recipe.reward.custom is not None:
        return FunctionRewards()
    off = tuple(make.catalog.plugins.off)
    terms = [_term(make, recipe, term, off) for term in recipe.reward.all_terms]
    asked = reward_types(make.catalog, prompts, [term.name for term in terms])
    routes = [_term(make, recipe, RewardTerm(name=n, plugin=None, weight=1.0), off) for n in asked]
    return InlineRewards(terms, routes)


def reward_types(catalog: Catalog, prompts: Sequence[Prompt], have: Sequence[str]) -> list[str]:
    """Return the rewards that rows ask for by ``metadata.rm_type``, besides the recipe's terms."""
    installed = catalog.names("reward")
    asked: dict[str, Prompt] = {}
    for prompt in prompts:
        name = row_type(prompt)
        if name is not None and name not in have:
            asked.setdefault(name, prompt)
    for name, prompt in asked.items():
        if name not in installed:
            raise BadInput(unknown_type(prompt, name, sorted({*have, *installed})))
    return list(asked)


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
    return [evaluation_set(make, recipe, entry) for entry in recipe.eval.datasets]


def evaluation_set(make: Maker, recipe: Any, entry: Any) -> EvaluationSet:
    """Read one evaluation data set; what it leaves unset is as in [eval] and [data]."""
    section = recipe.data.model_copy(
        update={
            "prompt_data": entry.path,
            "input_key": entry.input_key or recipe.eval.input_key or recipe.data.input_key,
            "metadata_key": entry.metadata_key or recipe.data.metadata_key,
        }
    )
    model = make.catalog.options_model("data_source", "jsonl")
    options = None if model is None else model()
    context = replace(make.context, section=section)
    source = make.catalog.create("data_source", "jsonl", options, context)
    changes = dict(entry.metadata_overrides)
    if entry.rm_type is not None:
        changes["rm_type"] = entry.rm_type
    prompts = tuple(
        replace(prompt, metadata={**prompt.metadata, **changes}) if changes else prompt
        for prompt in source.take(source.rows())
    )
    return EvaluationSet(
        name=entry.name, prompts=prompts, samples_per_prompt=entry.n_samples_per_prompt
    )

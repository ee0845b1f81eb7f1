"""From a recipe to its trainer: alone in this process, or on N ranks that build the same."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from drl.catalog import Catalog
from drl.checkpoint.keeper import SaveSettings
from drl.cluster.ranks import RankedTrainer, RankGroup
from drl.config import load_recipe
from drl.config.layers import AUTO
from drl.deterministic import make_deterministic
from drl.errors import BadInput, RankError
from drl.functions import Functions
from drl.mathematics.feeding import Feeding, guidance_by_option
from drl.model.build import Component, build_components
from drl.model.compiled import Compilations
from drl.model.ema import build_ema, build_old_policy, build_reference
from drl.model.idle import Idle
from drl.model.optimizers import build_optimizer, build_schedule, trainable_parameters
from drl.model.parallel import ALONE, Ranks, RankSettings
from drl.model.trainer import StepSettings, Trainer
from drl.stages.functions import with_functions
from drl.stages.loss import Forward, PolicyContext
from drl.stages.pairs import batch_plan, rank_count
from drl.types import Context, Need, Role, StepContext

if TYPE_CHECKING:
    from drl.interfaces.family import Family
    from drl.interfaces.loss import Loss
    from drl.interfaces.steps import SdeBackend
    from drl.model.ema import Ema


BATCHED = "sampling.batched_guidance"


class Maker:
    """Creates components: options from the recipe, context with their section; finds functions."""

    def __init__(self, recipe: Any, catalog: Catalog, context: Context) -> None:
        self.recipe = recipe
        self.catalog = catalog
        self.context = context
        self.functions = Functions(recipe, catalog)

    def __call__(self, kind: str, name: str, section: str, role: Role = Role.DRIVER) -> Any:
        """Create the component of this kind and name."""
        options = self.recipe.options(kind, name)
        return self.catalog.create(kind, name, options, self.at(section, role))

    def at(self, section: str, role: Role = Role.DRIVER) -> Context:
        """Return the context of a component that is chosen in this section."""
        return replace(self.context, role=role, section=self.recipe.section(section))


def sde_backends(make: Maker, recipe: Any) -> dict[str, SdeBackend]:
    """Return the engine's backends, of the stochastic and of the deterministic steps."""
    names = dict.fromkeys([recipe.sde.type, "ode"])
    return {name: make("sde_backend", name, "sde") for name in names}


def trainer_backends(make: Maker, recipe: Any) -> dict[str, SdeBackend]:
    """Return what scores the stochastic steps in the trainer: ``sde.backend`` stands in for ``sde.type``."""
    name = recipe.sde.backend or recipe.sde.type
    return {recipe.sde.type: make("sde_backend", name, "sde", Role.TRAIN)}


def build_loss(make: Maker) -> Loss:
    """Return the loss, with the functions of the recipe in place of its parts."""
    loss: Loss = make("loss", make.recipe.algorithm.loss, "algorithm", Role.TRAIN)
    return with_functions(loss, make.functions)


def rank_settings(recipe: Any) -> RankSettings:
    """Return how many ranks there are and how they find each other."""
    cluster = recipe.cluster
    return RankSettings(
        world=rank_count(recipe),
        device=cluster.device,
        replicas=recipe.train.dp_replicate_size,
        timeout_s=60 * cluster.distributed_timeout_minutes,
        cpu_backend=recipe.train.cpu_backend,
    )


def rank_context(recipe: Any, run_dir: Path | None, settings: RankSettings, rank: int) -> Context:
    """Return where the components of a rank are; rank 0 lives in the driver's process."""
    return Context(
        rank=rank,
        world=settings.world,
        device=settings.device_of(rank),
        dtype=recipe.train.forward_dtype,
        run_dir=run_dir,
        seed=recipe.train.seed,
    )


def start_trainer(
    make: Maker, family: Family, loss: Loss, settings: RankSettings
) -> tuple[Trainer | RankedTrainer, dict[str, Component]]:
    """Return the trainer and its components: alone in this process, or with its other ranks started."""
    if settings.world == 1:
        trainer, components = build_rank_trainer(make, family, loss, ALONE)
        return trainer, components
    built: dict[str, Component] = {}

    def build_here(ranks: Ranks) -> Trainer:
        trainer, components = build_rank_trainer(make, family, loss, ranks)
        built.update(components)
        return trainer

    spec = RankSpec(
        text=make.recipe.to_toml(),
        source=make.recipe.path.name,
        run_dir=make.context.run_dir,
        off=tuple(make.catalog.plugins.off),
        distributions=tuple(make.catalog.distributions),
    )
    group = RankGroup(settings)
    own = group.start(partial(build_rank, spec), build_here)
    return RankedTrainer(own, group), built


def trains_nothing(recipe: Any) -> bool:
    """True for a run that only generates, or only evaluates."""
    return bool(recipe.debug.rollout_only) or recipe.train.num_rollout == 0


def start_idle_trainer(
    make: Maker, family: Family, loss: Loss, settings: RankSettings
) -> tuple[Idle, dict[str, Component]]:
    """Return the trainer of a run that trains nothing, with components only where an engine needs them.

    An engine reads ``model.checkpoint`` by itself; adapters and checkpoints of a run are pushed to it.
    """
    recipe = make.recipe
    at_once = recipe.lora.enabled and recipe.lora.init_weights == "random"
    if recipe.lora.adapter_path is None and recipe.checkpoint.load is None and not at_once:
        return Idle(), {}
    trainer, components = start_trainer(make, family, loss, settings)
    return Idle(trainer), components


@dataclass(frozen=True, slots=True, kw_only=True)
class RankSpec:
    """What the process of a rank builds its trainer from: plain values, no classes.

    ``text``: the resolved recipe, as TOML. ``distributions``: the driver's plugins and versions.
    """

    text: str
    source: str
    run_dir: Path | None
    off: tuple[str, ...]
    distributions: tuple[tuple[str, str], ...]


def build_rank(spec: RankSpec, ranks: Ranks) -> Trainer:
    """Build the trainer of a rank above 0, in its own process, as the driver builds rank 0's."""
    catalog = Catalog.load(off=spec.off)
    check_plugins(catalog.distributions, spec.distributions, ranks.rank)
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / spec.source
        file.write_text(spec.text)
        recipe: Any = load_recipe(file, catalog=catalog)
    make_deterministic(recipe)
    context = rank_context(recipe, spec.run_dir, rank_settings(recipe), ranks.rank)
    make = Maker(recipe, catalog, context)
    family: Family = make("family", recipe.model.family, "model", Role.TRAIN)
    return build_rank_trainer(make, family, build_loss(make), ranks)[0]


def check_plugins(
    here: Sequence[tuple[str, str]], driver: Sequence[tuple[str, str]], rank: int
) -> None:
    """Raise RankError when a rank has other plugins, or other versions of them, than the driver."""
    ours, theirs = dict(here), dict(driver)
    different = [
        f"  {name}: {ours.get(name, 'not there')}, the driver has {theirs.get(name, 'none')}"
        for name in sorted(ours.keys() | theirs.keys())
        if ours.get(name) != theirs.get(name)
    ]
    if different:
        raise RankError(
            f"rank {rank} has other plugins than the driver:\n"
            + "\n".join(different)
            + "\ninstall nothing while a run starts; start it again"
        )


def build_rank_trainer(
    make: Maker, family: Family, loss: Loss, ranks: Ranks
) -> tuple[Trainer, dict[str, Component]]:
    """Build components and trainer of this process's rank; collective over the ranks."""
    recipe = make.recipe
    backends = trainer_backends(make, recipe) if Need.ROLLOUT in loss.needs else {}
    load = make.functions.get("model.backend")
    compilations = Compilations("trainer") if recipe.train.compile else None
    components = build_components(recipe, family, make.context, ranks, load, compilations)
    trainer = build_trainer(recipe, make.context, family, loss, backends, components, ranks)
    trainer.compilations = compilations
    trainer.make_updater = lambda name: make("updater", name, "sync", Role.TRAIN)
    return trainer, components


def build_trainer(
    recipe: Any,
    context: Context,
    family: Family,
    loss: Loss,
    backends: Mapping[str, SdeBackend],
    components: Mapping[str, Component],
    ranks: Ranks = ALONE,
) -> Trainer:
    """Return the trainer of this process, without an updater."""
    modules = {name: component.module for name, component in components.items()}
    parameters = trainable_parameters(modules)
    ema = build_ema(recipe, parameters, modules)
    reference = old = None
    if Need.OLD_PREDICTION in loss.needs and ema is None:
        old = build_old_policy(parameters, modules)
    if Need.REFERENCE in loss.needs:
        reference = build_reference(recipe.algorithm.ref_mode, modules, ema)
    forward = Forward(
        family=family,
        models=modules,
        loss=loss,
        backend=backends.get(recipe.sde.type),
        device=torch.device(context.device),
        dtype=recipe.train.forward_dtype,
        guidance=guidance_by_option(recipe.sampling),
        feeding={name: Feeding.of(component.config) for name, component in components.items()},
        batched_guidance=guidance_is_batched(recipe, family),
        old=old_policy(loss, old if ema is None else ema),
        reference=reference,
    )
    settings = StepSettings(
        schedule=build_schedule(recipe, batch_plan(recipe).optimizer_steps),
        clip_grad=recipe.optimizer.clip_grad,
        max_bad_steps=recipe.trust.max_bad_steps,
        buffer_bytes=recipe.sync.buffer_size,
        rollout_policy=recipe.ema.rollout_policy,
        reduce_dtype=recipe.train.reduce_dtype,
        skip="debug.skip_optimizer_step" if recipe.debug.skip_optimizer_step else None,
    )
    return Trainer(
        forward=forward,
        optimizer=build_optimizer(recipe, parameters),
        ema=ema,
        old=old,
        settings=settings,
        context=StepContext.within(context, section=recipe.algorithm),
        updater=None,
        ranks=ranks,
        saves=save_settings(recipe, components),
    )


def guidance_is_batched(recipe: Any, family: Family) -> bool:
    """True when engine and trainer make both predictions of guidance in one forward.

    It must be asked for, and the family must allow it for every component.
    """
    return bool(recipe.sampling.batched_guidance) and not two_forwards(recipe, family)


def two_forwards(recipe: Any, family: Family) -> list[str]:
    """Return the components that need a forward of its own for each prediction of guidance."""
    checkpoint = recipe.model.checkpoint
    configs = {
        name: family.pipeline_config(name, family.component_config(name, checkpoint))
        for name in recipe.model.components
    }
    return [name for name, config in configs.items() if not config.batched_guidance]


def check_guidance(recipe: Any, family: Family) -> None:
    """Raise BadInput where a recipe asks for one forward of guidance itself, and the family has none."""
    if not recipe.sampling.batched_guidance or recipe.origins[BATCHED] == AUTO:
        return
    separate = two_forwards(recipe, family)
    if separate:
        raise BadInput(
            f"{BATCHED} is true, but {', '.join(separate)} of model.family '{recipe.model.family}' needs "
            "a forward of its own for each prediction of guidance; set it to false"
        )


def old_policy(loss: Loss, weights: Ema | None) -> PolicyContext | None:
    """Return what turns a component into the old policy: the average, or the weights of before."""
    if Need.OLD_PREDICTION not in loss.needs or weights is None:
        return None
    return weights.swapped


def save_settings(recipe: Any, components: Mapping[str, Component]) -> SaveSettings:
    """Return what saves need to know of the components."""
    return SaveSettings(
        optimizer=recipe.checkpoint.save_optim,
        may_miss={name: c.config.optimizer_state_may_miss for name, c in components.items()},
        lora={name: c.lora for name, c in components.items() if c.lora is not None},
    )

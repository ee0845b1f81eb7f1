"""The probe: sample with the engine, score with the trainer, find out why they differ. Nothing is trained."""

from __future__ import annotations

import tomllib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from drl.align import forwards, records
from drl.align.changes import Difference, Finding, Scene, by_weight, find_causes
from drl.align.measure import (
    PairFigures,
    Replay,
    RowsFigures,
    StepFigures,
    average,
    by_step,
    over_rows,
    score,
    without_dropout,
    worst,
)
from drl.align.show import write
from drl.assemble import assemble, launch_of
from drl.checkpoint.folders import number_of
from drl.checkpoint.load import find_checkpoint
from drl.cluster.background import Background
from drl.config import load_recipe
from drl.config.environment import training_environment
from drl.config.render import warning_lines
from drl.deterministic import determinism
from drl.errors import BadInput, RecipeError, TrustError
from drl.launch import Start, in_iterations, loaded, restore, write_plugins
from drl.model.trainer import Trainer
from drl.observe.directory import RunDirectory, never_began
from drl.observe.files import write_text_atomic
from drl.stages.alignment import with_debug_tensors
from drl.stages.collect import drawn_prompts
from drl.stages.generate import generate
from drl.stages.pairs import make_shards
from drl.stages.rollout import group_requests, training_sampling
from drl.stages.sync import sync
from drl.stages.together import together
from drl.stages.trust import check_schedule, check_settings
from drl.stopping import AtOnce
from drl.types import Advantages, Group, Need, Prompt, Rollout, RolloutRequest, Sample

if TYPE_CHECKING:
    from drl.catalog import Catalog
    from drl.run import Run

FORCED = (
    "debug.skip_optimizer_step=true",
    "debug.engine_debug=true",
    "debug.rollout_only=false",
    "debug.ci.enabled=false",
    "trust.settings=false",
    "logging.loggers=[]",
    "cluster.actor_num_nodes=1",
    "cluster.actor_num_gpus_per_node=1",
    "cluster.offload=false",
    "cluster.offload_train=false",
    "cluster.offload_rollout=false",
    "train.dp_replicate_size=1",
)
"""What a probe changes in a recipe: one rank, no step, the engine's tensors; other settings end nothing."""

OUT = "--out"
"""The option of ``drl align`` that chooses the folder."""

RANDOM = "lora.init_weights=random"

KINDS = (
    forwards.eager_blocks,
    forwards.mode,
    records.stored_latents,
    records.schedules,
    records.conditions,
    forwards.guidance,
    forwards.adapters,
    forwards.precision,
    forwards.attention,
    forwards.compiled_blocks,
)
"""Kinds of changes, in their order: the first two would cover others, and the last cannot be undone."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    """What to probe: ``rollouts`` of about ``samples`` samples each.

    ``random``: fresh adapters start with values that change the model. ``causes``: look for the reasons of a
    difference. ``out``: a new folder.
    """

    recipe: Path
    sets: tuple[str, ...] = ()
    override: Path | None = None
    rollouts: int = 1
    samples: int = 16
    random: bool = True
    causes: bool = True
    out: Path | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Alignment:
    """What a probe found.

    ``mean``, ``max``: difference of log-probs over all pairs; ``limit``: ``trust.max_log_prob_diff``.
    ``other_settings``: what the engine used instead of what was asked, in words.
    """

    facts: Mapping[str, Any]
    steps: Sequence[StepFigures]
    pairs: int
    mean: float
    max: float
    limit: float
    rows: Sequence[RowsFigures] = ()
    findings: Sequence[Finding] = ()
    other_settings: Sequence[str] = ()

    @property
    def exact(self) -> bool:
        """True when rollout and trainer compute the same bits."""
        return self.max == 0.0

    @property
    def within(self) -> bool:
        """True when the largest difference is within the limit; never for NaN."""
        return self.max <= self.limit


def probe(
    wanted: Wanted, catalog: Catalog, echo: Callable[[str], None] = print
) -> tuple[Alignment, RunDirectory]:
    """Measure, and return what was found with the directory that holds it and the recipe as it was used.

    ``echo`` gets the warnings of the recipe. Raises BadInput, and leaves nothing behind, for a recipe that has
    nothing to compare.
    """
    recipe = probed_recipe(wanted, catalog, echo)
    with (
        AtOnce(),
        determinism(recipe) as variables,
        new_directory(recipe, wanted.out) as directory,
        training_environment({**variables, **recipe.train.env}),
    ):
        directory.sync.unlink(missing_ok=True)  # of a probe that was killed here
        write_text_atomic(directory.recipe, recipe.to_toml())
        write_plugins(recipe, directory, catalog)
        with started(recipe, catalog, directory) as run:
            found = measure(run, wanted)
        write(found, directory.path)
        return found, directory


def probed_recipe(wanted: Wanted, catalog: Catalog, echo: Callable[[str], None] = print) -> Any:
    """Return the recipe of a probe; BadInput for one whose training has no recorded steps of an engine."""

    def loaded_with(*sets: str) -> Any:
        words = [*wanted.sets, *sets]
        return load_recipe(wanted.recipe, sets=words, override=wanted.override, catalog=catalog)

    own = loaded_with()  # as it is: its problems and warnings are not those of a probe
    for line in warning_lines(own.warnings):
        echo(line)
    if own.train.num_rollout == 0:
        raise BadInput(
            "train.num_rollout = 0: this recipe trains nothing, so there is nothing to compare; leave it out"
        )
    try:
        recipe = loaded_with(*FORCED, *further_sets(own, random=wanted.random))
    except RecipeError as error:
        if any(problem.path == "debug.engine_debug" for problem in error.problems):
            raise BadInput(nothing_to_compare(own)) from None
        raise
    if recipe.debug.load_rollout_data is not None:
        raise BadInput(
            "debug.load_rollout_data: drl align compares an engine with the trainer, and a replay has no "
            "engine; leave it out"
        )
    if not recipe.debug.engine_debug or recipe.debug.rollout_only:
        raise BadInput(
            f"--override {wanted.override} sets [debug] against the probe; leave debug.engine_debug and "
            "debug.rollout_only out"
        )
    return in_iterations(recipe, catalog)


def further_sets(recipe: Any, *, random: bool) -> list[str]:
    """Return what else a probe of this recipe changes.

    A checkpoint may be that of a finished run. Fresh adapters leave the model as it is, so that merging them
    would prove nothing; ``random`` starts them otherwise.
    """
    load = recipe.checkpoint.load
    if load is not None:
        done = number_of(find_checkpoint(load, recipe.checkpoint.step)) or 0
        return [f"train.num_rollout={done + 1}"]
    fresh = recipe.lora.enabled and recipe.lora.adapter_path is None
    return [RANDOM] if random and fresh and recipe.lora.init_weights != "random" else []


def nothing_to_compare(recipe: Any) -> str:
    """Say that training needs no log-probs of an engine."""
    return (
        f"algorithm.loss = '{recipe.algorithm.loss}' trains on no recorded steps of an engine, so there are no "
        "log-probs to compare"
    )


def new_directory(recipe: Any, out: Path | None) -> RunDirectory:
    """Return a new run directory: ``out``, or a name beside those of the recipe's runs.

    It goes again with a probe that finds nothing, whatever ended it; one that was killed leaves it to the next.
    """
    if out is not None:
        directory = RunDirectory.create_at(out, option=OUT, unfinished=is_unfinished)
    else:
        name = f"{recipe.run.name[:90]}-align"
        directory = RunDirectory.create(Path(recipe.run.directory), name, option=OUT)
    directory.only_results = True
    return directory


def is_unfinished(folder: Path) -> bool:
    """True for what a probe leaves that was killed: its own files, and no result."""
    if not never_began(folder):
        return False
    try:
        table = tomllib.loads((folder / "recipe.toml").read_text("utf-8"))
    except FileNotFoundError:
        return True
    except (OSError, ValueError):
        return False
    debug = table.get("debug")
    return isinstance(debug, dict) and debug.get("skip_optimizer_step") is True


@contextmanager
def started(recipe: Any, catalog: Catalog, directory: RunDirectory) -> Iterator[Run]:
    """Build a run and start its engine; rewards, loggers and hooks of a training stay out of it."""
    with closing(Background()) as background, ExitStack() as stack:
        run = assemble(recipe, catalog, directory, background)
        stack.callback(run.trainer.close)
        restore(run, Start(load=loaded(recipe, resume=False)))
        if run.engines is None or not {Need.TRANSITION, Need.OLD_LOG_PROB} <= run.loss.needs:
            raise BadInput(nothing_to_compare(recipe))
        stack.callback(run.engines.close)
        run.engines.start(launch_of(run))
        yield run


def measure(run: Run, wanted: Wanted) -> Alignment:
    """Push the weights, sample, score every pair, and try changes when there is a difference."""
    sync(run, version=run.first_rollout)
    replay = replay_of(run)
    figures: dict[tuple[int, ...], PairFigures] = {}
    settings: list[str] = []
    most: tuple[Scene, Difference] | None = None
    for number in range(run.first_rollout, run.first_rollout + wanted.rollouts):
        rollout, told = sampled(run, number, wanted.samples)
        settings += [text for text in told if text not in settings]
        scene = scene_of(run, rollout, replay)
        found = score(scene.replay, scene.batches)
        figures |= found
        if most is None or not worst(found) <= most[1][1]:
            most = scene, (average(found), worst(found))
    assert most is not None
    scene, base = most
    still = without_dropout(scene.replay)
    rows = over_rows(still, scene.pairs, forwards.sizes(scene))
    findings: list[Finding] = []
    if wanted.causes and base[1] != 0.0:
        findings = [
            *forwards.rows_of_a_forward(scene, still, rows),
            *find_causes(scene, base, KINDS),
        ]
    return Alignment(
        facts=facts_of(run, figures, scene),
        steps=by_step(figures),
        pairs=len(figures),
        mean=average(figures),
        max=worst(figures),
        limit=run.recipe.trust.max_log_prob_diff,
        rows=rows,
        findings=by_weight(findings),
        other_settings=settings,
    )


def replay_of(run: Run) -> Replay:
    """Return the training forward of a run under the weights that its engine has."""
    trainer = run.trainer
    assert isinstance(trainer, Trainer)  # one rank, and a run that trains
    return Replay(forward=trainer.forward, context=trainer.context, around=trainer.rolled_out)


def scene_of(run: Run, rollout: Rollout, replay: Replay) -> Scene:
    """Return the micro-batches that training would have, with the engine's tensors, and all about them."""
    count = len(rollout.samples)
    advantages = Advantages(
        values=torch.ones(count)
    )  # the rows must weigh; what they weigh is not looked at
    shards = with_debug_tensors(run, make_shards(run, rollout, advantages), rollout)
    recipe, sampling = run.recipe, training_sampling(run.recipe)
    options = recipe.options("engine", recipe.rollout.engine)
    return Scene(
        replay=replay,
        batches=[batch for shard in shards for window in shard.windows for batch in window],
        samples={sample.index: sample for sample in rollout.samples},
        sigmas=run.schedule(sampling),
        timesteps=None if run.pipeline is None else run.pipeline.timesteps(sampling),
        engine_options={} if options is None else options.model_dump(),
        compiled=recipe.train.compile,
        blocks={name: component.config.wrap for name, component in run.components.items()},
    )


def sampled(run: Run, rollout_id: int, samples: int) -> tuple[Rollout, list[str]]:
    """Return some whole groups, generated and not scored, and what the engine did otherwise than asked."""
    section = run.recipe.rollout
    groups = min(section.batch_size, -(-samples // section.n_samples_per_prompt))
    first = run.counters.next_group
    run.counters.next_group += groups
    prompts = drawn_prompts(run.source, groups)
    made = run.background.run(
        _groups(run, rollout_id, [*zip(prompts, range(first, first + groups), strict=True)])
    )
    told = {text: None for _, told in made for text in told}
    rollout = Rollout(
        rollout_id=rollout_id, version=run.version, groups=[group for group, _ in made]
    )
    return rollout, [*told]


Made = tuple[Group, list[str]]


async def _groups(run: Run, rollout_id: int, draws: Sequence[tuple[Prompt, int]]) -> list[Made]:
    return await together(_group(run, rollout_id, prompt, index) for prompt, index in draws)


async def _group(run: Run, rollout_id: int, prompt: Prompt, index: int) -> Made:
    recipe = run.recipe
    requests = group_requests(
        recipe, training_sampling(recipe), run.strategy, prompt, index, rollout_id
    )
    parts = await together(generate(run, request) for request in requests)
    told: list[str] = []
    for request, samples in zip(requests, parts, strict=True):
        for sample, member in zip(samples, request.members, strict=True):
            sample.index = index * recipe.rollout.n_samples_per_prompt + member
            sample.reward = 0.0  # or it would weigh nothing
            told += other_settings(run, request, sample)
    samples = [sample for part in parts for sample in part]
    return Group(group_index=index, prompt=prompt, samples=samples), told


def other_settings(run: Run, request: RolloutRequest, sample: Sample) -> Iterator[str]:
    """Say what a sample was made with instead of what its request asks for."""
    try:
        check_settings(sample, request.sampling)
        check_schedule(run, sample, request)
    except TrustError as error:
        yield str(error)


def facts_of(
    run: Run, figures: Mapping[tuple[int, ...], PairFigures], scene: Scene
) -> dict[str, Any]:
    """Return what was compared, as plain values."""
    recipe, forward = run.recipe, scene.replay.forward
    guided = Need.GUIDANCE in run.loss.needs and any(g.on for g in forward.guidance.values())
    return {
        "name": recipe.run.name,
        "family": recipe.model.family,
        "engine": recipe.rollout.engine,
        "loss": recipe.algorithm.loss,
        "sde": recipe.sde.type,
        "device": recipe.cluster.device,
        "forward_dtype": forward.dtype,
        "guidance_scale": recipe.sampling.guidance_scale if guided else None,
        "batched_guidance": forward.batched_guidance if guided else None,
        "micro_batch_size": max(len(batch) for batch in scene.batches),
        "lora": recipe.lora.init_weights if recipe.lora.enabled else None,
        "dropout": without_dropout(scene.replay) is not scene.replay,
        "compile": recipe.train.compile,
        "engine_options": dict(scene.engine_options),
        "pairs": len(figures),
    }

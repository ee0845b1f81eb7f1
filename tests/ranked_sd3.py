"""The tiny Stable Diffusion 3 on N ranks: what each rank builds, and the gradients that it finds."""

from __future__ import annotations

import pickle
from collections.abc import Mapping
from pathlib import Path

import torch
from ranked_trainer import gradients
from safetensors.torch import save_file

from drl.assemble import assemble, launch_of
from drl.catalog import Catalog
from drl.cluster.background import Background
from drl.cluster.ranks_wire import dumps
from drl.config import load_recipe
from drl.model.parallel import Ranks
from drl.model.trainer import Trainer
from drl.observe.directory import RunDirectory
from drl.stages.advantage import estimate
from drl.stages.collect import collect
from drl.stages.pairs import make_shards
from drl.stages.sync import sync
from drl.trainers import RankSpec, build_rank

SEVEN = ("rollout.batch_size=1", "rollout.n_samples_per_prompt=7", "train.micro_batch_size=3")
"""Samples that no number of ranks divides, in micro-batches that are never full."""


def record(recipe_file: Path, folder: Path, worlds: tuple[int, ...], *sets: str) -> RankSpec:
    """Make one rollout; keep its shards for each world, and the gradients that one rank finds."""
    catalog = Catalog.load()
    recipe = load_recipe(recipe_file, sets=(*SEVEN, *sets), catalog=catalog)
    background = Background()
    with RunDirectory.create_at(folder / "run") as directory:
        run = assemble(recipe, catalog, directory, background)
        background.run(run.rewards.start())
        run.engines.start(launch_of(run))
        sync(run, version=0)
        rollout = collect(run, 0)
        advantages = estimate(run, rollout)
        for world in worlds:
            run.ranks = world
            shards = make_shards(run, rollout, advantages)
            (folder / f"shards-{world}").write_bytes(dumps(shards))
        background.run(run.rewards.close())
        run.engines.close()
        background.close()
    spec = RankSpec(
        text=recipe.to_toml(),
        source="tiny.toml",
        run_dir=folder,
        off=(),
        distributions=tuple(catalog.distributions),
    )
    find_gradients({"one": spec}, {"one": folder}, Ranks())
    return spec


def find_gradients(
    specs: Mapping[str, RankSpec], folders: Mapping[str, Path], ranks: Ranks
) -> Trainer:
    """Train one step of each spec on this rank's shard; rank 0 keeps whole gradients and the report."""
    for name, spec in specs.items():
        trainer = build_rank(spec, ranks)
        folder = folders[name]
        shards = pickle.loads((folder / f"shards-{ranks.world}").read_bytes())
        parity = trainer.replay(shards)
        (report,) = trainer.train(shards)
        found = gradients(trainer)
        if ranks.rank == 0:
            save_file(found, folder / f"gradients-{ranks.world}.safetensors")
            (folder / f"report-{ranks.world}").write_bytes(pickle.dumps((parity, report)))
    assert torch.is_grad_enabled()
    return trainer

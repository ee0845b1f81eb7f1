"""Classes and functions that a recipe names by their paths, in a run: as if they were registered."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from e2e import final_state, run_here, same, write_recipe

from drl.assemble import assemble, launch_of
from drl.catalog import Catalog
from drl.cluster.background import Background
from drl.config import load_recipe
from drl.errors import BadInput, ContractError, TrustError
from drl.model.parallel import ALONE
from drl.observe.directory import RunDirectory
from drl.trainers import RankSpec, build_rank

SOURCES = Path(__file__).with_name("third_party")

BY_PATH = {
    "model.pipeline_config": "acme_paths:Tiny",
    "rollout.engine": "acme_paths:Engine",
    "data.source": "acme_paths:Source",
    "sde.step_strategy": "acme_paths:Window",
    "sde.type": "acme_paths:Cps",
    "reward.type": "acme_paths_reward:Jpeg",
    "algorithm.advantage_estimator": "acme_paths:Estimator",
    "algorithm.loss": "acme_paths:Policy",
    "sync.updater": "acme_paths:Lora",
}
PATHS = (
    *(f"{option}={path}" for option, path in BY_PATH.items()),
    'logging.loggers=["console", "acme_paths:Lines"]',
    "sde.log_prob_no_const=true",
)
SHORT = ("train.num_rollout=1", "eval.before_train=false", "eval.after_train=false")


@pytest.fixture(autouse=True)
def parts(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The folder of acme_paths is searched, in this process and in those that it starts."""
    monkeypatch.syspath_prepend(SOURCES)
    monkeypatch.setenv("PYTHONPATH", str(SOURCES))
    importlib.invalidate_caches()
    yield
    for name in ("acme_paths", "acme_paths_reward"):
        sys.modules.pop(name, None)


@pytest.fixture
def recipe(tmp_path: Path, checkpoint: Path) -> Path:
    return write_recipe(tmp_path, checkpoint)


def built(recipe: Path, folder: Path, *sets: str) -> Any:
    """Return a run that is assembled and not started."""
    background = Background()
    loaded: Any = load_recipe(recipe, sets=sets, catalog=Catalog.load())
    try:
        with RunDirectory.create_at(folder / "built") as directory:
            return assemble(loaded, loaded.catalog, directory, background)
    finally:
        background.close()


def test_a_run_by_paths_is_the_run_by_names(recipe: Path, tmp_path: Path) -> None:
    run_here(recipe, tmp_path / "names", *SHORT)
    run_here(recipe, tmp_path / "paths", *SHORT, *PATHS)
    assert same(final_state(tmp_path / "names"), final_state(tmp_path / "paths"))
    assert (tmp_path / "paths" / "metrics.jsonl").stat().st_size > 0
    stored = (tmp_path / "paths" / "recipe.toml").read_text()
    assert all(f'"{path}"' in stored for path in BY_PATH.values())
    load_recipe(tmp_path / "paths" / "recipe.toml", catalog=Catalog.load())


def test_another_rank_builds_from_the_same_paths(recipe: Path, tmp_path: Path) -> None:
    loaded: Any = load_recipe(recipe, sets=PATHS, catalog=Catalog.load())
    spec = RankSpec(
        text=loaded.to_toml(),
        source="tiny.toml",
        run_dir=tmp_path,
        off=(),
        distributions=tuple(loaded.catalog.distributions),
    )
    trainer = build_rank(spec, ALONE)
    kinds = [
        type(trainer.forward.family),
        type(trainer.forward.loss),
        type(trainer.forward.backend),
    ]
    assert [f"{kind.__module__}:{kind.__name__}" for kind in kinds] == [
        "acme_paths:Tiny",
        "acme_paths:Policy",
        "acme_paths:Cps",
    ]


def test_the_trainers_backend_replaces_its_side_alone(recipe: Path, tmp_path: Path) -> None:
    run = built(recipe, tmp_path, "sde.backend=acme_paths:Flow")
    assert type(run.trainer.forward.backend).__name__ == "Flow"
    assert {n: type(b).__name__ for n, b in launch_of(run).sde_backends.items()} == {
        "cps": "CpsSde",
        "ode": "FlowOde",
    }


def test_other_mathematics_in_the_trainer_is_found_by_parity(recipe: Path, tmp_path: Path) -> None:
    run_here(recipe, tmp_path / "same", *SHORT, "sde.backend=acme_paths:Cps")
    with pytest.raises(TrustError, match="rollout and trainer disagree"):
        run_here(recipe, tmp_path / "other", *SHORT, "sde.backend=sde")


def test_the_models_backend_loads_what_is_trained(recipe: Path, tmp_path: Path) -> None:
    plain = built(recipe, tmp_path / "plain")
    twice = built(recipe, tmp_path / "twice", "model.backend=acme_paths:load")
    assert sys.modules["acme_paths"].BUILT == ["transformer"]
    before = dict(plain.components["transformer"].module.named_parameters())
    after = dict(twice.components["transformer"].module.named_parameters())
    frozen = [name for name, parameter in before.items() if not parameter.requires_grad]
    assert frozen
    assert all(torch.equal(after[name], 2 * before[name]) for name in frozen)


def test_a_backend_that_loads_no_model_is_named(recipe: Path, tmp_path: Path) -> None:
    with pytest.raises(ContractError) as refusal:
        built(recipe, tmp_path, "model.backend=acme_paths:load_nothing")
    assert str(refusal.value) == (
        "model.backend must return a torch module for transformer, got dict"
    )


def test_functions_are_imported_when_a_run_starts(
    recipe: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = built(recipe, tmp_path / "right", "rollout.sample_filter=acme_paths:keep")
    chosen = run.functions.get("rollout.sample_filter")
    assert vars(chosen)["__wrapped__"] is sys.modules["acme_paths"].keep
    (tmp_path / "acme_late.py").write_text("keep = [1][0] or print")
    monkeypatch.syspath_prepend(tmp_path)
    importlib.invalidate_caches()
    with pytest.raises(BadInput) as refusal:
        run_here(recipe, tmp_path / "wrong", "rollout.sample_filter=acme_late:keep")
    assert "rollout.sample_filter: acme_late:keep must be a function, got 1" in str(refusal.value)
    sys.modules.pop("acme_late")


@pytest.mark.slow
def test_a_run_by_paths_on_two_ranks(recipe: Path, tmp_path: Path) -> None:
    ranks = ("cluster.actor_num_gpus_per_node=2", "train.micro_batch_size=2")
    run_here(recipe, tmp_path / "names", *SHORT, *ranks)
    run_here(recipe, tmp_path / "paths", *SHORT, *ranks, *PATHS)
    assert same(final_state(tmp_path / "names"), final_state(tmp_path / "paths"))

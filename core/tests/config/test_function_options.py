"""Paths and functions in a recipe: what is wrong with them is said when it is checked, without their code."""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
from collections.abc import Callable
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from typing import Any

import pytest

from drl.catalog import Catalog
from drl.config import load_recipe
from drl.config.machine import Machine
from drl.config.rules.functions import OF_ROLLOUTS
from drl.config.signatures import wanted
from drl.kinds import KINDS, SLOTS

Problems = Callable[..., dict[str, str]]
Load = Callable[..., Any]

LOUD = "import pathlib\npathlib.Path(__file__).with_name('ran').touch()\nraise SystemExit(3)\n"
MODULE = (
    LOUD
    + """
from elsewhere import borrowed

def keep(run, groups): ...
def short(groups): ...
def three(run, groups, more): ...
async def scores(run, samples, **words): ...
def fits(*arguments, **words): ...
async def waits(*arguments, **words): ...
@borrowed
def covered(run, groups): ...

class Source: ...
class Policy:
    needs = frozenset({Need.ROLLOUT, Need.OLD_LOG_PROB, Need.TRANSITION})
class Supervised:
    needs = frozenset()
class Plain(Policy): ...
class Quiet:
    has_density = False
class Flat:
    has_density = True
    last_step_has_variance = False
"""
)
FILTER = "rollout.sample_filter"


@pytest.fixture(autouse=True)
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The module acme_options.parts, which leaves a file behind when it runs, and ends the process."""
    site = tmp_path / "paths"
    (site / "acme_options").mkdir(parents=True)
    (site / "acme_options" / "__init__.py").write_text(LOUD)
    (site / "acme_options" / "parts.py").write_text(MODULE)
    monkeypatch.syspath_prepend(site)
    monkeypatch.setenv("PYTHONPATH", str(site))
    importlib.invalidate_caches()
    return site / "acme_options"


def path_of(name: str) -> str:
    return f"acme_options.parts:{name}"


@pytest.mark.parametrize(
    ("value", "said"),
    [
        (path_of("short"), "takes 1 argument (groups), but is called with (run, groups)"),
        (path_of("three"), "needs the argument 'more' too, but is called with (run, groups)"),
        (path_of("scores"), "must not be async, because drl does not await it: write 'def'"),
        (path_of("Source"), "acme_options.parts:Source is a class, not a function"),
        (path_of("kep"), "acme_options.parts has no kep; did you mean 'keep'?"),
        ("acme_options.part:keep", "acme_options has no module 'part'; did you mean 'parts'?"),
        ("acme_nowhere:keep", "there is no module 'acme_nowhere'"),
        ("acme_options.parts.keep", "did you mean 'acme_options.parts:keep'?"),
        ("Keep", 'must be a name in lower_snake or a path "package.module:name"'),
        ("keep", f"no function named 'keep' for {FILTER} is installed"),
        (3, "must be text"),
    ],
)
def test_a_function_that_does_not_fit_is_refused(
    problems: Problems, module: Path, value: Any, said: str
) -> None:
    found = problems({FILTER: value})
    assert list(found) == [FILTER]
    assert said in found[FILTER]
    assert not (module / "ran").exists()


@pytest.mark.parametrize(
    ("name", "why"),
    [("borrowed", "imports it"), ("covered", "decorates covered")],
)
def test_what_the_source_does_not_tell_is_a_warning(
    warnings: Callable[..., dict[str, str]], module: Path, name: str, why: str
) -> None:
    found = warnings({FILTER: path_of(name)})
    assert found == {
        FILTER: f"{path_of(name)} is checked when the run starts: acme_options.parts {why}"
    }
    assert not (module / "ran").exists()


def test_a_function_that_fits_is_kept_as_it_is_written(load: Load, module: Path) -> None:
    recipe = load({FILTER: path_of("keep")})
    assert recipe.rollout.sample_filter == path_of("keep")
    assert recipe.warnings == ()
    assert f'sample_filter = "{path_of("keep")}"' in recipe.to_toml()
    assert not (module / "ran").exists()


def test_checking_imports_neither_the_recipes_modules_nor_torch(
    load: Load, module: Path, tmp_path: Path, base: str
) -> None:
    load({FILTER: path_of("keep"), "data.source": path_of("Source")})
    code = (
        "import sys; from drl.catalog import Catalog; from drl.config import load_recipe\n"
        "from drl.config.machine import Machine\n"
        "load_recipe('recipe.toml', catalog=Catalog.load(), machine=Machine(cuda=False))\n"
        "loaded = {name.partition('.')[0] for name in sys.modules}\n"
        "sys.exit(len(loaded & {'torch', 'acme_options', 'diffusers'}))"
    )
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, env=environment, check=False)
    assert done.returncode == 0
    assert not (module / "ran").exists()


CLASSES = {
    "family": "model.family",
    "engine": "rollout.engine",
    "data_source": "data.source",
    "step_strategy": "sde.step_strategy",
    "sde_backend": "sde.type",
    "reward": "reward.type",
    "advantage": "algorithm.advantage_estimator",
    "updater": "sync.updater",
}


@pytest.mark.parametrize(("kind", "option"), CLASSES.items())
def test_every_component_can_be_named_by_its_path(
    load: Load, problems: Problems, module: Path, kind: str, option: str
) -> None:
    recipe = load({option: path_of("Source")})
    entry = recipe.catalog.find(kind, path_of("Source"))
    assert (entry.kind, entry.component.target) == (kind, path_of("Source"))
    assert entry.owner == "acme_options (by its path)"
    name = "source" if kind == "reward" else path_of("Source")
    assert recipe.options(kind, name) is None
    found = problems({option: path_of("keep")})
    interface = {row.name: row.interface for row in KINDS}[kind].partition(":")[2]
    assert found[option] == (
        f"{path_of('keep')} is a function, not a class derived from drl.api.{interface}"
    )
    found = problems({option: path_of("Sauce")})
    assert found[option] == "acme_options.parts has no Sauce; did you mean 'Source'?"
    assert not (module / "ran").exists()


def test_loggers_and_terms_are_named_by_their_paths_too(load: Load, problems: Problems) -> None:
    terms = [{"name": "mine", "plugin": path_of("Source")}, {"name": "jpeg"}]
    recipe = load(
        {
            "logging.loggers": [path_of("Source"), "jsonl"],
            "reward.type": None,
            "reward.terms": terms,
        }
    )
    assert recipe.logging.loggers == (path_of("Source"), "jsonl")
    assert recipe.reward.all_terms[0].component == path_of("Source")
    assert recipe.term_options("mine") is None
    found = problems({"reward.type": None, "reward.terms": terms, "reward.mine.size": 3})
    assert "has no options" in found["reward.mine.size"]
    terms[0]["name"] = path_of("Source")
    assert "must match" in problems({"reward.terms": terms})["reward.terms[0].name"]


def test_the_resolved_recipe_names_the_same_paths(load: Load, tmp_path: Path) -> None:
    catalog = Catalog.load()
    recipe = load(
        {
            "model.pipeline_config": path_of("Source"),
            "data.source": path_of("Source"),
            "reward.type": path_of("Source"),
            "sde.backend": "cps",
            "sde.log_prob_no_const": True,
        }
    )
    assert recipe.model.family == recipe.model.pipeline_config == path_of("Source")
    assert recipe.origins["model.family"] == "auto"
    again = tmp_path / "again.toml"
    again.write_text(recipe.to_toml())
    second = load_recipe(again, catalog=catalog, machine=Machine(cuda=False))
    assert second.resolved() == recipe.resolved()


def test_a_family_is_named_once(problems: Problems) -> None:
    given = {"model.pipeline_config": path_of("Source"), "model.family": "sd3"}
    assert problems(given) == {
        "model.pipeline_config": "and model.family = 'sd3' are both given; keep one of them"
    }
    assert "must be a path" in problems({"model.pipeline_config": "sd3"})["model.pipeline_config"]
    found = problems({"model.pipeline_config": path_of("Sauce")})
    assert found == {
        "model.pipeline_config": "acme_options.parts has no Sauce; did you mean 'Source'?"
    }


def test_a_registered_class_is_used_by_its_name(problems: Problems) -> None:
    found = problems({"reward.type": "drl_reward_jpeg.reward:JpegReward"})
    assert found == {
        "reward.type": "drl_reward_jpeg.reward:JpegReward is registered as 'jpeg': write that name"
    }


def test_a_loss_says_what_it_needs_in_its_class(load: Load, problems: Problems) -> None:
    assert load({"algorithm.loss": path_of("Policy")}).algorithm.loss == path_of("Policy")
    for silent in ("Plain", "Source", "borrowed"):
        found = problems({"algorithm.loss": path_of(silent)})
        assert "write  needs = frozenset({Need.ROLLOUT, ...})" in found["algorithm.loss"]
    found = problems({"algorithm.loss": path_of("Supervised")})
    assert "must be true: algorithm.loss" in found["train.train_only"]
    quiet = {"algorithm.loss": path_of("Policy"), "sde.type": path_of("Quiet")}
    assert "has no density" in problems(quiet)["sde.type"]


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        (
            {"sde.backend": "ode"},
            "'ode' has no density, but algorithm.loss 'policy_loss' needs one",
        ),
        ({"sde.backend": path_of("Quiet")}, "has no density"),
        ({"sde.backend": "cps", "sde.log_prob_no_const": False}, "without constants only"),
        ({"sde.backend": "cpss"}, "no SDE backend named 'cpss' is installed\ndid you mean 'cps'?"),
        (
            {
                "sde.backend": path_of("Flat"),
                "sde.step_strategy": "all",
                "algorithm.kl_beta": 0.1,
            },
            "keep step 9 out of the trained steps, or set algorithm.kl_beta = 0",
        ),
    ],
)
def test_a_backend_of_the_trainer_must_serve_the_loss(
    problems: Problems, changes: dict[str, Any], said: str
) -> None:
    found = problems(changes)
    assert said in found["sde.backend"]


def test_a_backend_that_scores_nothing_is_a_warning(
    warnings: Callable[..., dict[str, str]],
) -> None:
    assert "sde.backend" not in warnings({"sde.backend": "sde"})
    unused = {
        "sde.backend": "cps",
        "algorithm.loss": "nft",
        "sde.type": "ode",
        "sde.noise_level": 0.0,
        "sde.step_strategy": "ode_and_return_last",
        "sde.num_steps": 0,
        "ema.enabled": True,
        "algorithm.ref_mode": "ema",
    }
    assert warnings(unused)["sde.backend"] == "is not used: algorithm.loss 'nft' scores no step"


def test_functions_of_rollouts_have_no_use_without_rollouts(
    warnings: Callable[..., dict[str, str]],
) -> None:
    supervised = {
        "train.train_only": True,
        "algorithm.loss": "sft_loss",
        "data.source": "glyphs",
        "reward.type": None,
    }
    waiting = {slot.option for slot in SLOTS if wanted(slot.option).asynchronous}
    slots = {slot.option for slot in SLOTS}
    unused = {o for o in slots if o in OF_ROLLOUTS or o.startswith("reward.")}
    silent = {o: path_of("waits" if o in waiting else "fits") for o in unused}
    found = warnings({**supervised, **silent})
    reason = "is not used: train.train_only runs without rollouts"
    assert len(unused) == 9
    assert unused <= {path for path, said in found.items() if reason in said}


def test_options_of_an_engine_have_no_use_without_one(
    warnings: Callable[..., dict[str, str]],
) -> None:
    given = {"rollout.local.rows": 4, "rollout.local.compile": False}  # the second as it is anyway
    supervised = {"train.train_only": True, "algorithm.loss": "sft_loss", "data.source": "glyphs"}
    found = warnings({**supervised, **given})
    assert found["rollout.local.rows"] == "is not used: train.train_only runs without an engine"
    assert "rollout.local.compile" not in found
    assert "rollout.local.rows" not in warnings(given)


def test_noise_and_rewards_have_no_use_without_rollouts(
    warnings: Callable[..., dict[str, str]],
) -> None:
    given = {
        "sde.noise_level": 0.5,
        "sde.num_steps": 0,  # as it is anyway
        "sde.step_strategy": None,
        "sde.backend": "sde",
        "reward.type": "jpeg",
        "rollout.max_draws": 7,
        "trust.parity": False,
    }
    supervised = {"train.train_only": True, "algorithm.loss": "sft_loss", "data.source": "glyphs"}
    found = warnings({**supervised, **given})
    reason = "is not used: train.train_only runs without rollouts"
    told = {path for path in given if found.get(path) == reason}
    assert told == given.keys() - {"sde.num_steps", "sde.step_strategy"}
    assert "rollout.max_draws" not in warnings({"rollout.max_draws": 7})


OFFER = """
from drl.api import Component, hookimpl
DRL_API = (1, 0)

@hookimpl
def drl_register_functions():
    return [Component('mine', 'acme_slots.parts:{name}', summary='Mine.', slot='{slot}')]
"""


@pytest.mark.parametrize(
    ("name", "slot", "said"),
    [
        ("keep", FILTER, None),
        ("short", FILTER, "acme_slots.parts:short takes 1 argument (groups)"),
        ("gone", FILTER, "'mine' of acme-slots 1.0 is broken: acme_slots.parts has no gone"),
        (
            "keep",
            "rollout.custom_log",
            "no function named 'mine' for rollout.sample_filter is inst",
        ),
    ],
)
def test_a_registered_function_is_checked_alike(
    load: Load,
    problems: Problems,
    make_plugin: Callable[..., EntryPoint],
    name: str,
    slot: str,
    said: str | None,
) -> None:
    point = make_plugin(
        "acme-slots", OFFER.format(name=name, slot=slot), files={"acme_slots/parts.py": MODULE}
    )
    catalog = Catalog.load(installed=[*entry_points(group="drl.plugins"), point])
    if said is None:
        recipe = load({FILTER: "mine"}, catalog=catalog)
        assert recipe.catalog.find("function", "mine", FILTER).owner == "acme-slots 1.0"
    else:
        assert said in problems({FILTER: "mine"}, catalog=catalog)[FILTER]


@pytest.mark.parametrize("slot", SLOTS, ids=lambda slot: slot.option)
def test_every_slot_compares_with_its_own_protocol(problems: Problems, slot: Any) -> None:
    found = problems({slot.option: path_of("short")})
    assert found[slot.option].startswith(
        f"{path_of('short')} takes 1 argument (groups), but is called"
    )

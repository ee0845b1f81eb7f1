"""A stranger's engine that is a server gets the options of router and transport; no other engine does."""

from __future__ import annotations

import importlib
import tomllib

import pytest
from e2e import run_here

from drl.api import ServerSettings

STRANGERS = ("acme-recorder", "acme-served")

CHANGED = {
    "rollout.server_concurrency": 7,
    "rollout.use_router": "true",
    "rollout.router_timeout": 2.5,
    "rollout.router_max_connections": 11,
    "rollout.router_failure_threshold": 30,
    "rollout.distributed_post": "true",
    "rollout.parser_num_workers": 4,
    "rollout.patch_groups": "sgld,ltx",
}
SHORT = ("train.num_rollout=1", "sampling.num_steps=3", "eval.datasets=[]")


@pytest.fixture
def started(lab):
    """What engines of the stranger were told in this test, in the order of their starts."""
    known = importlib.import_module("acme_served_engine").STARTED
    known.clear()
    return known


def given(engine, **changes):
    """Settings of a short run by this engine."""
    sets = {"rollout.engine": engine, **changes}
    return [*SHORT, *(f"{key}={value}" for key, value in sets.items())]


def test_every_changed_option_reaches_the_engine_and_a_resumed_run_may_change_it(
    recipe, tmp_path, started
):
    run_dir = tmp_path / "run"
    run_here(recipe, run_dir, *given("acme_served", **CHANGED))
    first = ServerSettings(
        router_max_connections=11,
        router_timeout_s=2.5,
        router_failure_threshold=30,
        distributed_post=True,
        parser_workers=4,
        patch_groups=("sgld", "ltx"),
    )
    assert started == [first]
    later = {"rollout.router_timeout": 9, "rollout.distributed_post": "false"}
    again = given("acme_served", **CHANGED | later, **{"train.num_rollout": 2})
    run_here(recipe, run_dir, *again, resume=True)
    assert (started[1].router_timeout_s, started[1].distributed_post) == (9.0, False)


def test_what_is_left_out_is_derived_and_the_run_s_recipe_says_so(recipe, tmp_path, started):
    run_here(recipe, tmp_path / "run", *given("acme_served", **{"rollout.server_concurrency": 5}))
    assert started == [ServerSettings(router_max_connections=5)]
    written = tomllib.loads((tmp_path / "run" / "recipe.toml").read_text())["rollout"]
    assert written["use_router"] is True
    assert written["router_failure_threshold"] == 3
    assert written["distributed_post"] is False
    assert written["parser_num_workers"] == 1
    assert not {"router_timeout", "router_max_connections", "patch_groups"} & written.keys()


def test_an_engine_of_this_process_is_told_nothing(recipe, tmp_path, started):
    run_here(recipe, tmp_path / "run", *given("acme_embedded"))
    assert started == [None]
    assert "router" not in (tmp_path / "run" / "recipe.toml").read_text()


def test_an_engine_named_by_its_path_may_be_a_server(recipe, tmp_path, started):
    settings = given("acme_served_engine:Named", **{"rollout.patch_groups": "wan"})
    run_here(recipe, tmp_path / "run", *settings)
    assert started == [ServerSettings(router_max_connections=512, patch_groups=("wan",))]


def test_the_command_refuses_them_for_the_local_engine_and_writes_nothing(recipe, tmp_path, drl):
    sets = [word for key, value in CHANGED.items() for word in ("--set", f"{key}={value}")]
    code, out, err = drl("run", str(recipe), "--run-dir", str(tmp_path / "run"), *sets)
    assert (code, (tmp_path / "run").exists()) == (2, False)
    for key in CHANGED.keys() - {"rollout.server_concurrency"}:
        assert f"{key}  has no use: engine 'local' runs in this process" in out + err

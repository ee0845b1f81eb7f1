"""Options of engines that are servers: refused for others, with values that follow where left out."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from drl.assemble import server_settings
from drl.catalog import Catalog
from drl.config.recipe import Recipe
from drl.config.rules.served import SERVED_ONLY
from drl.interfaces.engine import ServerSettings
from drl.testing.distributions import write_distribution

Problems = Callable[..., dict[str, str]]
Load = Callable[..., Recipe]

PLUGIN = """
from drl.api import Component, hookimpl

DRL_API = (1, 0)

@hookimpl
def drl_register_engines():
    return [
        Component(
            "acme_patched", "acme_servers.engine:Patched", summary="Served, with two patches.",
            facts={"served": True, "patch_groups": ("sgld", "ltx")},
        ),
        Component(
            "acme_plain", "acme_servers.engine:Plain", summary="Served.", facts={"served": True}
        ),
        Component("acme_inside", "acme_servers.engine:Inside", summary="Not served."),
    ]
"""

VALUES: dict[str, Any] = {
    "rollout.use_router": True,
    "rollout.router_timeout": 2.5,
    "rollout.router_max_connections": 11,
    "rollout.router_failure_threshold": 30,
    "rollout.distributed_post": True,
    "rollout.parser_num_workers": 4,
    "rollout.patch_groups": ["ltx"],
}
AT_DEFAULT: dict[str, Any] = {
    "rollout.use_router": True,
    "rollout.router_failure_threshold": 3,
    "rollout.distributed_post": False,
    "rollout.parser_num_workers": 1,
    "rollout.patch_groups": [],
}
PATCHED = {"rollout.engine": "acme_patched"}


@pytest.fixture
def servers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Catalog:
    """The installed plugins and a stranger's engines, whose classes a check never imports."""
    site = tmp_path / "site"
    files = {"acme_servers/plugin.py": PLUGIN, "acme_servers/__init__.py": ""}
    write_distribution(site, "acme-servers", files)
    monkeypatch.syspath_prepend(site)
    importlib.invalidate_caches()
    return Catalog.load()


def test_these_are_all_options_of_servers() -> None:
    assert set(VALUES) == set(SERVED_ONLY)


@pytest.mark.parametrize(
    ("path", "value"), [*VALUES.items(), *AT_DEFAULT.items(), ("rollout.use_router", False)]
)
def test_an_engine_of_this_process_has_no_use_for_them(
    problems: Problems, path: str, value: Any
) -> None:
    assert problems({path: value}) == {
        path: "has no use: engine 'local' runs in this process; leave it out"
    }


def test_an_engine_that_does_not_say_so_is_not_served(problems: Problems, servers: Catalog) -> None:
    changes = {"rollout.engine": "acme_inside", **VALUES}
    found = problems(changes, catalog=servers)
    assert set(found) == set(VALUES)
    assert all("engine 'acme_inside' runs in this process" in said for said in found.values())


@pytest.mark.parametrize(("path", "value"), [*VALUES.items(), *AT_DEFAULT.items()])
def test_a_served_engine_takes_each(load: Load, servers: Catalog, path: str, value: Any) -> None:
    recipe = load({**PATCHED, path: value}, catalog=servers)
    plain = tuple(value) if isinstance(value, list) else value
    assert vars(recipe.rollout)[path.partition(".")[2]] == plain
    assert recipe.origins[path] == "recipe.toml"
    assert recipe.warnings == ()


def test_all_of_them_together_are_the_settings_of_the_engine(load: Load, servers: Catalog) -> None:
    recipe = load({**PATCHED, **VALUES}, catalog=servers)
    assert server_settings(recipe, servers) == ServerSettings(
        router_max_connections=11,
        router_timeout_s=2.5,
        router_failure_threshold=30,
        distributed_post=True,
        parser_workers=4,
        patch_groups=("ltx",),
    )


def test_what_a_server_is_not_told_follows(load: Load, servers: Catalog) -> None:
    recipe = load({**PATCHED, "rollout.server_concurrency": 20}, catalog=servers)
    assert server_settings(recipe, servers) == ServerSettings(
        router_max_connections=20,
        router_timeout_s=None,
        router_failure_threshold=3,
        distributed_post=False,
        parser_workers=1,
        patch_groups=(),
    )
    assert recipe.rollout.use_router is True
    assert {recipe.origins[path] for path in AT_DEFAULT if path != "rollout.patch_groups"} == {
        "auto"
    }
    again = load(text=recipe.to_toml(), catalog=servers)
    assert again.resolved() == recipe.resolved()


def test_without_a_server_they_stay_unset_and_the_resolved_recipe_can_be_read_again(
    load: Load, catalog: Catalog
) -> None:
    recipe = load()
    assert [vars(recipe.rollout)[path.partition(".")[2]] for path in SERVED_ONLY] == [None] * 7
    assert server_settings(recipe, catalog) is None
    assert load(text=recipe.to_toml()).resolved() == recipe.resolved()


def test_another_router_is_refused(problems: Problems, servers: Catalog) -> None:
    (said,) = problems({**PATCHED, "rollout.use_router": False}, catalog=servers).values()
    assert said.startswith(
        "must be true: requests to engine 'acme_patched' go through drl's router"
    )


@pytest.mark.parametrize(
    ("engine", "groups", "said"),
    [
        ("acme_patched", ["sgld", "flux"], "has no patch group 'flux'; it has sgld, ltx"),
        ("acme_patched", "sgld, LTX", "has no patch group 'LTX'; it has sgld, ltx"),
        ("acme_plain", ["sgld"], "has no patch group 'sgld'; it has none"),
        ("acme_patched", ["ltx", "ltx"], "must not contain 'ltx' twice"),
    ],
)
def test_a_group_of_patches_is_one_that_the_engine_states(
    problems: Problems, servers: Catalog, engine: str, groups: Any, said: str
) -> None:
    changes = {"rollout.engine": engine, "rollout.patch_groups": groups}
    found = problems(changes, catalog=servers)
    assert list(found) == ["rollout.patch_groups"]
    assert said in found["rollout.patch_groups"]


def test_groups_may_be_one_text_with_commas(load: Load, servers: Catalog) -> None:
    recipe = load({**PATCHED, "rollout.patch_groups": "ltx, sgld"}, catalog=servers)
    assert recipe.rollout.patch_groups == ("ltx", "sgld")


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("rollout.router_timeout", 0),
        ("rollout.router_timeout", -1.5),
        ("rollout.router_max_connections", 0),
        ("rollout.router_failure_threshold", 0),
        ("rollout.parser_num_workers", 0),
    ],
)
def test_counts_and_seconds_are_above_zero(
    problems: Problems, servers: Catalog, path: str, value: float
) -> None:
    found = problems({**PATCHED, path: value}, catalog=servers)
    assert "above 0" in found[path] or "greater than 0" in found[path]


def test_an_engine_that_is_not_installed_is_the_only_thing_said(problems: Problems) -> None:
    assert list(problems({"rollout.engine": "acme_gone", **VALUES})) == ["rollout.engine"]

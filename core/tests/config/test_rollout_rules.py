"""Rules about rollouts: draws, filters, own data, rewards by function, options of some models only."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from drl.catalog import Catalog
from drl.config.recipe import Recipe
from drl.testing.distributions import write_distribution

Problems = Callable[..., dict[str, str]]
Warnings = Callable[..., dict[str, str]]
Load = Callable[..., Recipe]

FUNCTIONS = """
from drl.api import DataSource

def keep(run, group):
    return True

def choose(run, rollout_id, buffer, count):
    return buffer[:count]

def make(run, rollout_id, source, *, evaluation=False):
    raise NotImplementedError

async def score(run, samples):
    return [0.0 for _ in samples]

class Mine(DataSource):
    pass
"""


@pytest.fixture(autouse=True)
def acme(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A module of functions that a recipe may name."""
    site = tmp_path / "site"
    site.mkdir()
    (site / "acme_mine.py").write_text(FUNCTIONS)
    monkeypatch.syspath_prepend(site)
    importlib.invalidate_caches()


OVER, FILTER = "rollout.over_sampling_batch_size", "rollout.dynamic_sampling_filter"
CUSTOM = {"reward.type": None, "reward.custom": "acme_mine:score"}
OWN_DATA = {"data.global_dataset": False, "data.prompt_data": None}


@pytest.mark.parametrize(
    ("changes", "path", "said"),
    [
        ({OVER: 3}, OVER, "B16: must be at least rollout.batch_size = 4, got 3"),
        (
            {FILTER: "zero_std", "rollout.n_samples_per_prompt": 1},
            FILTER,
            "drops every group of rollout.n_samples_per_prompt = 1",
        ),
        (
            {
                FILTER: "drl.builtin.functions_rollout:zero_std",
                "rollout.n_samples_per_prompt": 1,
            },
            FILTER,
            "sample each prompt twice or more",
        ),
        ({**OWN_DATA}, "data.global_dataset", "set rollout.function to a function"),
        (
            {**OWN_DATA, "rollout.function": "own"},
            "data.global_dataset",
            "drl's own rollout needs text",
        ),
        (
            {"data.source": "blank", "data.prompt_data": None},
            "data.source",
            "gives prompts without text",
        ),
        (
            {**OWN_DATA, "data.source": "jsonl", "data.prompt_data": "prompts.jsonl"},
            "data.global_dataset",
            "is false, but data.source 'jsonl' reads a data set",
        ),
        (
            {"data.global_dataset": False, "rollout.function": "acme_mine:make"},
            "data.prompt_data",
            "has no use: data.global_dataset asks for blank prompts",
        ),
        ({"reward.custom": "acme_mine:score"}, "reward.type", "and reward.custom are both given"),
        ({**CUSTOM, "reward.key": "a"}, "reward.key", "returns one number per sample"),
        ({**CUSTOM, "eval.reward_key": "a"}, "eval.reward_key", "returns one number per sample"),
        ({"sampling.fps": 8.0}, "sampling.fps", "family 'sd3' makes pictures, not videos"),
        (
            {"sampling.guidance_scale_2": 3.0},
            "sampling.guidance_scale_2",
            "family 'sd3' has one guidance scale, sampling.guidance_scale",
        ),
        (
            {"eval.datasets": [{"name": "a", "path": "heldout.jsonl", "rm_type": "jpg"}]},
            "eval.datasets[0].rm_type",
            "no reward named 'jpg' is installed; there is ",
        ),
        (
            {
                **CUSTOM,
                "eval.datasets": [{"name": "a", "path": "heldout.jsonl", "rm_type": "jpeg"}],
            },
            "eval.datasets[0].rm_type",
            "reward.custom scores every sample",
        ),
    ],
)
def test_what_does_not_go_together_is_refused(
    problems: Problems, changes: dict[str, Any], path: str, said: str
) -> None:
    found = problems(changes)
    assert list(found) == [path]
    assert said in found[path]


@pytest.mark.parametrize(
    "changes",
    [
        {OVER: 4},
        {OVER: 6, FILTER: "zero_std"},
        {OVER: 6, "rollout.function": "acme_mine:make"},
        {OVER: 6, FILTER: "acme_mine:keep", "rollout.buffer_filter": "pop_first"},
        {"rollout.buffer_filter": "acme_mine:choose", "rollout.function": "acme_mine:make"},
        {**OWN_DATA, "rollout.function": "acme_mine:make"},
        {**OWN_DATA, "data.source": "acme_mine:Mine"},
        CUSTOM,
        {"reward.key": "bytes", "reward.group": True},
        {"eval.interval": 2, "eval.function": "acme_mine:make"},
        {"train.num_rollout": 0, "eval.function": "own"},
        {"eval.datasets": [{"name": "a", "path": "heldout.jsonl", "rm_type": "jpeg"}]},
        {"rollout.server_concurrency": 1},
    ],
)
def test_what_goes_together_gives_no_word(warnings: Warnings, changes: dict[str, Any]) -> None:
    assert warnings(changes) == {}


@pytest.mark.parametrize(
    ("changes", "path", "said"),
    [
        ({OVER: 6}, OVER, "2 groups of each rollout are made and left out"),
        ({"rollout.buffer_filter": "pop_first"}, "rollout.buffer_filter", "is not used"),
        (
            {OVER: 4, "rollout.buffer_filter": "pop_first"},
            "rollout.buffer_filter",
            "above rollout.batch_size = 4",
        ),
    ],
)
def test_what_is_odd_is_a_warning(
    warnings: Warnings, changes: dict[str, Any], path: str, said: str
) -> None:
    found = warnings(changes)
    assert list(found) == [path]
    assert said in found[path]


def test_a_plugin_that_filters_makes_over_sampling_useful(
    load: Load, site_with_filter: Catalog
) -> None:
    assert load({OVER: 6}, catalog=site_with_filter).warnings == ()


@pytest.fixture
def site_with_filter(tmp_path: Path) -> Catalog:
    source = """
from drl.api import hookimpl

DRL_API = (1, 0)

@hookimpl
def drl_filter_group(run, group):
    return None
"""
    write_distribution(
        tmp_path / "site", "acme-filter", {"acme_filter.py": source}, entry_point="acme_filter"
    )
    importlib.invalidate_caches()
    return Catalog.load()


def test_own_data_means_blank_prompts_and_the_resolved_recipe_says_so(load: Load) -> None:
    recipe = load({**OWN_DATA, "rollout.function": "acme_mine:make"})
    assert recipe.data.source == "blank"
    assert recipe.origins["data.source"] == "auto"
    again = load(text=recipe.to_toml())
    assert (again.data.source, again.data.global_dataset) == ("blank", False)


def test_the_part_that_is_trained_on_is_evaluated_unless_another_is_named(load: Load) -> None:
    assert load({"reward.key": "bytes"}).eval.reward_key == "bytes"
    named = load({"reward.key": "bytes", "eval.reward_key": "size"})
    assert (named.reward.key, named.eval.reward_key) == ("bytes", "size")


def family_of(facts: dict[str, Any]) -> Catalog:
    """The installed plugins, where sd3 says other things of itself."""
    catalog = Catalog.load()
    catalog._entries = [
        replace(entry, component=replace(entry.component, facts=facts))
        if (entry.kind, entry.component.name) == ("family", "sd3")
        else entry
        for entry in catalog.entries()
    ]
    return catalog


EXPERTS = {"transformer": "guidance_scale", "transformer_2": "guidance_scale_2"}
VIDEO = {"media": ("video",), "guidance_options": EXPERTS}


def test_a_video_family_takes_frames_per_second_and_a_second_guidance(load: Load) -> None:
    changes = {
        "sampling.fps": 16.0,
        "sampling.num_frames": 5,
        "sampling.guidance_scale_2": 3.0,
        "model.components": ["transformer", "transformer_2"],
    }
    recipe = load(changes, catalog=family_of(VIDEO))
    assert (recipe.sampling.fps, recipe.sampling.guidance_scale_2) == (16.0, 3.0)


@pytest.mark.parametrize(
    ("changes", "path", "said"),
    [
        ({"sampling.fps": 16.0}, "sampling.fps", "sampling.num_frames is 1"),
        (
            {"model.components": ["transformer_2"]},
            "sampling.guidance_scale_2",
            "is required: component 'transformer_2' of family 'sd3' is guided by it",
        ),
    ],
)
def test_a_video_family_has_its_own_mistakes(
    problems: Problems, changes: dict[str, Any], path: str, said: str
) -> None:
    found = problems(changes, catalog=family_of(VIDEO))
    assert list(found) == [path]
    assert said in found[path]

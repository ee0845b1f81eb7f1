"""Where rules begin to apply: the last value that is fine, the first that is not, and what is said."""

from __future__ import annotations

import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from drl.catalog import Catalog
from drl.config import load_recipe
from drl.config.batch import batch_knobs
from drl.config.draft import NotKnown
from drl.config.machine import Machine
from drl.config.steps import pairs_per_sample, trainable_steps
from drl.errors import BadInput, BatchError
from drl.options import Options

Load = Callable[..., Any]
Problems = Callable[..., dict[str, str]]
Warnings = Callable[..., dict[str, str]]
FIRST_STEPS = {"sde.step_strategy": None}
SUPERVISED = {
    "algorithm.loss": "sft_loss",
    "train.train_only": True,
    "reward.type": None,
    "sde.step_strategy": None,
    "sde.num_steps": None,
    "rollout.n_samples_per_prompt": 1,
}


@pytest.mark.parametrize(
    ("samples", "per_step", "steps", "expected"),
    [
        (16, None, None, (16, 1)),
        (16, 16, None, (16, 1)),
        (16, 1, None, (1, 16)),
        (16, None, 16, (1, 16)),
        (1, 1, 1, (1, 1)),
        (768, 48, 16, (48, 16)),
    ],
)
def test_batch_knobs_follow_each_other(
    samples: int, per_step: int | None, steps: int | None, expected: tuple[int, int]
) -> None:
    assert batch_knobs(samples, per_step, steps) == expected
    chosen, count = batch_knobs(samples, per_step, steps)
    assert isinstance(count, int)
    assert chosen * count == samples


@pytest.mark.parametrize(
    ("per_step", "steps", "rule"),
    [(17, None, "B4"), (None, 17, "B4"), (5, 5, "B4"), (8, 4, "B3"), (4, 2, "B3")],
)
def test_knobs_that_do_not_fit_name_their_rule(
    per_step: int | None, steps: int | None, rule: str
) -> None:
    with pytest.raises(BatchError, match=f"^{rule}: "):
        batch_knobs(16, per_step, steps)


def test_a_request_as_large_as_its_group_is_fine_and_the_default_never_warns(
    warnings: Warnings,
) -> None:
    assert warnings({"rollout.microgroup_size": 4}) == {}
    assert warnings({"rollout.n_samples_per_prompt": 16, "rollout.batch_size": 1}) == {}
    assert warnings({"rollout.microgroup_size": 5}) == {
        "rollout.microgroup_size": "is 5, but a group has only rollout.n_samples_per_prompt = 4 "
        "samples"
    }


def test_a_default_micro_batch_size_is_nobodys_mistake(warnings: Warnings) -> None:
    assert warnings({"train.micro_batch_size": None}) == {}
    assert "train.micro_batch_size" in warnings({"train.micro_batch_size": 3})


def test_as_many_first_steps_as_there_are_is_a_warning_and_one_more_an_error(
    warnings: Warnings, problems: Problems
) -> None:
    said = warnings({**FIRST_STEPS, "sde.num_steps": 10})
    assert said == {
        "sde.step_strategy": "is not set: the first 10 steps are stochastic in every sample"
    }
    assert problems({**FIRST_STEPS, "sde.num_steps": 11}) == {
        "sde.num_steps": "must be at most sampling.num_steps = 10, got 11"
    }


def test_a_chosen_strategy_and_a_supervised_run_ask_for_no_first_steps(
    warnings: Warnings,
) -> None:
    assert warnings({"sde.num_steps": 2}) == {}
    assert "sde.step_strategy" not in warnings(SUPERVISED)


def test_weights_of_reward_terms_may_be_0_as_long_as_one_is_not(
    load: Load, problems: Problems
) -> None:
    def terms(*weights: float) -> dict[str, Any]:
        names = ["a", "b"]
        listed = [
            {"name": name, "plugin": "jpeg", "weight": weight}
            for name, weight in zip(names, weights, strict=True)
        ]
        return {"reward.type": None, "reward.terms": listed}

    assert [term.weight for term in load(terms(0.0, -1.0)).reward.all_terms] == [0.0, -1.0]
    assert problems(terms(0.0, 0.0)) == {
        "reward.terms": "all have weight 0: there is nothing to train on"
    }


@pytest.mark.parametrize(
    ("mean", "std", "normalization", "odd"),
    [
        (True, False, True, True),
        (True, True, True, False),
        (True, False, False, False),
        (False, False, True, False),
    ],
)
def test_a_global_mean_with_the_deviation_of_a_group_is_odd(
    warnings: Warnings, mean: bool, std: bool, normalization: bool, odd: bool
) -> None:
    table = {"globalize_mean": mean, "globalize_std": std, "std_normalization": normalization}
    found = warnings({f"algorithm.grpo.{key}": value for key, value in table.items()})
    assert list(found) == (["algorithm.grpo.globalize_mean"] if odd else [])


def test_files_are_told_apart_from_folders_and_other_files(
    problems: Problems, folder: Path
) -> None:
    (folder / "prompts.csv").touch()
    (folder / "prompts").mkdir()
    assert problems({"data.prompt_data": "prompts.csv"}) == {
        "data.prompt_data": "must end in .jsonl, one JSON object per line; got 'prompts.csv'"
    }
    assert problems({"data.prompt_data": "prompts"})["data.prompt_data"].endswith(
        "is a folder; data.source 'jsonl' reads a file"
    )
    assert problems({"data.prompt_data": None}) == {
        "data.prompt_data": "is required by data.source 'jsonl': a .jsonl file of prompts"
    }


def test_another_source_reads_what_it_likes(load: Load, folder: Path) -> None:
    (folder / "anything").mkdir()
    for given in (None, "anything", "prompts.jsonl"):
        assert load({"data.source": "glyphs", "data.prompt_data": given}).data.source == "glyphs"


@pytest.mark.parametrize(
    ("stem", "name"),
    [
        ("x" * 101, "x" * 100),
        ("x" * 100, "x" * 100),
        ("-_.a b..", "a-b"),
        ("1.5e-4", "1.5e-4"),
        ("🎨", "run"),
        ("a/../b".replace("/", "⁄"), "a-..-b"),
    ],
)
def test_the_name_of_a_run_is_made_of_what_every_file_system_takes(
    folder: Path, base: str, catalog: Catalog, stem: str, name: str
) -> None:
    file = folder / f"{stem}.toml"
    file.write_text(base)
    recipe = load_recipe(file, catalog=catalog, machine=Machine())
    assert (recipe.run.name, recipe.origins["run.name"]) == (name, "auto")


@pytest.mark.parametrize(
    ("cuda", "changes", "limit"),
    [
        (False, {}, 1e-5),
        (True, {}, 2e-3),
        (True, {"train.forward_dtype": "fp32"}, 1e-5),
        (True, {"trust.max_log_prob_diff": 0.5}, 0.5),
    ],
)
def test_the_parity_limit_follows_the_precision(
    load: Load, cuda: bool, changes: dict[str, Any], limit: float
) -> None:
    assert load(changes, cuda=cuda).trust.max_log_prob_diff == limit


class Facts:
    """What the pair arithmetic reads of a draft."""

    def __init__(self, strategy: str | None, count: int, total: int, **table: Any) -> None:
        self.values = {
            "sampling.num_steps": total,
            "sde.num_steps": count,
            "sde.step_strategy": strategy,
            "train.train_only": False,
            "rollout.custom_convert": None,
            "rollout.custom_expand": None,
        }
        self.table = table
        self.loss_facts: dict[str, Any] = {}

    def get(self, path: str) -> Any:
        return self.values[path]

    def option(self, kind: str, name: str, key: str) -> Any:
        return self.table[key]

    def facts(self, kind: str, path: str) -> dict[str, Any]:
        return self.loss_facts


@pytest.mark.parametrize(
    ("facts", "steps", "pairs"),
    [
        (Facts(None, 3, 10), {0, 1, 2}, 3),
        (Facts(None, 12, 10), set(range(10)), 10),
        (Facts("all", 0, 4), {0, 1, 2, 3}, 4),
        (Facts("sde_window", 2, 10, range=None), set(range(10)), 2),
        (Facts("sde_window", 2, 10, range=(3, 6)), {3, 4, 5}, 2),
        (Facts("sde_window", 5, 10, range=(3, 6)), {3, 4, 5}, 3),
        (Facts("epoch_global_random_choice", 5, 10, candidate_steps=(7, 2)), {2, 7}, 2),
    ],
)
def test_trainable_steps_and_pairs_by_strategy(facts: Any, steps: set[int], pairs: int) -> None:
    assert trainable_steps(facts) == steps
    assert pairs_per_sample(facts) == pairs


@pytest.mark.parametrize(("share", "pairs"), [(0.99, 9), (1.0, 10), (0.5, 5), (0.01, 1), (0.35, 3)])
def test_a_loss_may_train_a_share_of_the_steps_whatever_the_strategy(
    share: float, pairs: int
) -> None:
    facts: Any = Facts(None, 0, 10, portion=share)
    facts.loss_facts = {"step_share": "portion"}
    facts.values["algorithm.loss"] = "acme"
    assert pairs_per_sample(facts) == pairs


def test_a_supervised_sample_is_one_pair_and_a_strangers_strategy_is_unknown() -> None:
    stranger: Any = Facts("acme_steps", 3, 10)
    with pytest.raises(NotKnown):
        pairs_per_sample(stranger)
    stranger.values["train.train_only"] = True
    assert pairs_per_sample(stranger) == 1
    for option in ("rollout.custom_convert", "rollout.custom_expand"):
        stranger.values[option] = "acme:pairs"
        with pytest.raises(NotKnown):
            pairs_per_sample(stranger)
        stranger.values[option] = None


def test_components_nobody_configured_have_their_defaults(load: Load) -> None:
    recipe = load()
    other = recipe.options("reward", "ocr")
    assert isinstance(other, Options)
    assert other == type(other)()
    assert recipe.options("sde_backend", "ode") is None
    assert recipe.term_options("jpeg") == recipe.options("reward", "jpeg")
    with pytest.raises(AttributeError):
        recipe.section("nowhere")


def test_a_complete_recipe_has_no_empty_tables_and_sorted_components(load: Load) -> None:
    sets = {"reward.jpeg.quality": 50, "algorithm.policy_loss.clip_range": 0.5}
    written = tomllib.loads(load(sets).to_toml())
    assert all(written.values())
    assert written["reward"]["jpeg"]["quality"] == 50
    tables = [key for key, value in written["algorithm"].items() if isinstance(value, dict)]
    assert tables == sorted(tables)
    assert {"grpo", "policy_loss"} <= set(tables)


def test_a_line_break_in_a_name_of_a_set_is_refused(problems: Problems) -> None:
    sets = [{"name": "a\nb", "path": "heldout.jsonl"}]
    assert "eval.datasets[0].name" in problems({"eval.datasets": sets})


def test_the_same_set_twice_is_refused_by_name(problems: Problems) -> None:
    sets = [{"name": "words", "path": "heldout.jsonl"}] * 2
    assert problems({"eval.datasets": sets}) == {
        "eval.datasets": "has two sets named 'words', got [a table, a table]"
    }


def test_a_recipe_that_is_bad_input_exits_with_2(problems: Problems) -> None:
    assert BadInput.exit_code == 2
    assert problems({"train.num_rollout": -1}) == {
        "train.num_rollout": "must be at least 0, got -1"
    }


@pytest.mark.parametrize("path", ["checkpoint.load", "data.prompt_data"])
def test_a_file_of_no_name_is_not_the_current_folder(problems: Problems, path: str) -> None:
    assert "must name a file or folder" in problems({path: ""})[path]

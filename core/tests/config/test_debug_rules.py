"""Modes, dumps and checks of ``[debug]``, the length of a run, and its environment: what a check says."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from drl.config.batch import kept_groups
from drl.config.environment import training_environment
from drl.config.explain import explain
from drl.config.places import file_of
from drl.errors import BadInput

Load = Callable[..., Any]
Texts = Callable[..., dict[str, str]]

SUPERVISED = {
    "algorithm.loss": "sft_loss",
    "train.train_only": True,
    "data.source": "glyphs",
    "reward.type": None,
    "sde.step_strategy": None,
}
EVALUATED = {"eval.datasets": [{"name": "heldout", "path": "heldout.jsonl"}]}
CI = {
    **EVALUATED,
    "debug.ci.enabled": True,
    "debug.ci.metric_key": "eval/heldout",
    "debug.ci.metric_threshold": 0.5,
}
REPLAY = {"debug.load_rollout_data": "recorded-{rollout_id}"}


@pytest.mark.parametrize(
    ("option", "value", "said"),
    [
        ("save_rollout_data", "dumps/all.bin", "must contain {rollout_id}, so that each file"),
        ("save_rollout_data", "{rolout_id}/{rollout_id}", "no other field, got {rolout_id}"),
        ("save_rollout_data", "{rollout_id:04d}", "must contain {rollout_id}"),
        ("save_rollout_data", "{rollout_id}-{rank}", "no other field, got {rank}"),
        ("save_rollout_data", "", "must name a file or folder"),
        ("load_rollout_data", "dumps/0.bin", "must contain {rollout_id}"),
        ("save_train_data", "dumps/{rollout_id}", "must contain {rollout_id} and {rank}"),
        ("load_rollout_subsample", 0.0, "above 0"),
        ("load_rollout_subsample", 1.01, "at most 1"),
    ],
)
def test_templates_and_shares_that_cannot_be(
    problems: Texts, option: str, value: Any, said: str
) -> None:
    found = problems({f"debug.{option}": value})
    assert said in found[f"debug.{option}"]


def test_templates_start_at_the_recipe_and_fields_are_filled_in(load: Load, folder: Path) -> None:
    recipe = load({"debug.save_train_data": "d/{rollout_id}/{rank}.x", "train.num_rollout": 2})
    assert recipe.debug.save_train_data == folder / "d" / "{rollout_id}" / "{rank}.x"
    written = file_of(recipe.debug.save_train_data, rollout_id=3, rank=1)
    assert written == folder / "d" / "3" / "1.x"
    # braces that belong to the name of a folder are left alone
    assert file_of(Path("/a{b}/{rollout_id}"), rollout_id="eval_2") == Path("/a{b}/eval_2")


def test_a_folder_of_details_sets_both_templates_unless_they_are_given(
    load: Load, folder: Path
) -> None:
    both = load({"debug.dump_details": "all"}).debug
    assert both.save_rollout_data == folder / "all/rollout_data/{rollout_id}.safetensors"
    assert both.save_train_data == folder / "all/train_data/{rollout_id}_{rank}.safetensors"
    mixed = load({"debug.dump_details": "all", "debug.save_rollout_data": "mine/{rollout_id}"})
    assert mixed.debug.save_rollout_data == folder / "mine/{rollout_id}"
    assert mixed.origins["debug.save_train_data"] == "auto"
    assert load().debug.save_rollout_data is None


def test_rollouts_alone_exclude_what_trains(problems: Texts, warnings: Texts) -> None:
    on = {"debug.rollout_only": True}
    assert "nothing to generate" in problems({**SUPERVISED, **on})["debug.rollout_only"]
    assert "trains nothing" in problems({**REPLAY, **on})["debug.load_rollout_data"]
    unused = warnings({**on, "debug.skip_optimizer_step": True, "debug.dump_details": "all"})
    assert unused["debug.skip_optimizer_step"] == "is not used: debug.rollout_only trains nothing"
    assert "debug.save_train_data" not in unused  # nobody gave it


def test_a_replay_needs_the_file_of_each_of_its_rollouts(problems: Texts, load: Load) -> None:
    load({**REPLAY, "train.num_rollout": 4})
    found = problems({**REPLAY, "train.num_rollout": 6})["debug.load_rollout_data"]
    assert "recorded-4 (2 of 6 rollouts are missing)" in found
    assert "lower train.num_rollout" in found
    # those before the first iteration are not read
    (gone,) = problems({**REPLAY, "train.num_rollout": 5, "train.start_rollout_id": 3}).values()
    assert "recorded-4 (1 of 2 rollouts" in gone


def test_a_replay_is_without_engines_by_itself(load: Load, problems: Texts) -> None:
    """Both ways of saying so are one: the loss decides what ``train_only`` means."""
    both = load({**REPLAY, "train.train_only": True})
    assert both.train.train_only is False
    assert both.origins["train.train_only"] == "auto"
    supervised = load({**SUPERVISED, **REPLAY})
    assert supervised.train.train_only is True
    assert "trains on rollouts" in problems({"train.train_only": True})["train.train_only"]


def test_a_replay_writes_elsewhere_and_evaluates_nothing(problems: Texts, warnings: Texts) -> None:
    same = {**REPLAY, "debug.save_rollout_data": "recorded-{rollout_id}"}
    assert "is where debug.load_rollout_data reads" in problems(same)["debug.save_rollout_data"]
    assert "without an engine" in warnings({**REPLAY, **EVALUATED})["eval.datasets"]


@pytest.mark.parametrize(("share", "kept"), [(0.25, 1), (0.24, 0), (0.5, 2), (0.99, 3), (1.0, 4)])
def test_a_share_of_four_groups_is_rounded_down_to_whole_ones(
    problems: Texts, load: Load, share: float, kept: int
) -> None:
    changes = {**REPLAY, "debug.load_rollout_subsample": share}
    assert kept_groups(4, share) == kept
    if kept:
        assert load(changes).debug.load_rollout_subsample == share
    else:
        found = problems(changes)["debug.load_rollout_subsample"]
        assert found.startswith("keeps no group: 0.24 of rollout.batch_size = 4")
        assert "at least 0.25" in found


def test_a_share_without_a_replay_is_said_to_be_unused(warnings: Texts) -> None:
    found = warnings({"debug.load_rollout_subsample": 0.1})
    assert "debug.load_rollout_data is not set" in found["debug.load_rollout_subsample"]


def test_outputs_are_compared_where_steps_are_recorded(problems: Texts, load: Load) -> None:
    assert load({"debug.engine_debug": True}).debug.engine_debug
    for changes in (SUPERVISED, {"algorithm.loss": "nft", "sde.type": "ode"}):
        found = problems({**changes, "debug.engine_debug": True})
        assert "trains on none" in found["debug.engine_debug"]


def test_a_check_of_evaluations_needs_its_figure_and_its_threshold(
    problems: Texts, load: Load
) -> None:
    assert load(CI).debug.ci.metric_threshold == 0.5
    bare = problems({**EVALUATED, "debug.ci.enabled": True})
    assert bare == {
        "debug.ci.metric_key": "is required by debug.ci.enabled",
        "debug.ci.metric_threshold": "is required by debug.ci.enabled",
    }
    other = problems({**CI, "debug.ci.metric_key": "eval/held-out"})["debug.ci.metric_key"]
    assert other == "must name a figure of the evaluations (eval/heldout), got 'eval/held-out'"
    load({**CI, "debug.ci.metric_key": "eval/heldout/rollout_sampler"})


@pytest.mark.parametrize(
    "changes",
    [
        {"eval.datasets": []},
        REPLAY,
        {"eval.before_train": False, "eval.after_train": False},
        {"eval.before_train": False, "debug.rollout_only": True},
    ],
)
def test_a_check_needs_an_evaluation(problems: Texts, changes: dict[str, Any]) -> None:
    assert "this run has none" in problems({**CI, **changes})["debug.ci.enabled"]


@pytest.mark.parametrize(
    ("setting", "path", "said"),
    [
        ("debug.ci=true", "debug.ci", "must be a table, got true"),
        ("debug.ci.metric=1", "debug.ci.metric", "unknown option; did you mean 'metric_key'?"),
        ("debug.ci.enabled='yes'", "debug.ci.enabled", "must be true or false, got 'yes'"),
        ("debug.ci.metric_threshold='1'", "debug.ci.metric_threshold", "must be a number, got '1'"),
    ],
)
def test_mistakes_in_the_table_are_found_like_those_of_a_section(
    problems: Texts, setting: str, path: str, said: str
) -> None:
    assert problems(sets=[setting])[path].startswith(said)


def test_a_check_that_is_off_leaves_its_options_unused(warnings: Texts) -> None:
    found = warnings({**CI, "debug.ci.enabled": False})
    assert found["debug.ci.metric_key"] == "is not used: debug.ci.enabled is false"
    assert "debug.ci.metric_threshold" in found


def test_epochs_may_give_the_length_and_iterations_win(
    load: Load, problems: Texts, warnings: Texts
) -> None:
    assert load({"train.num_rollout": None, "train.num_epoch": 2}).train.num_rollout is None
    neither = problems({"train.num_rollout": None})["train.num_rollout"]
    assert neither.endswith("or give train.num_epoch (B17)")
    both = warnings({"train.num_epoch": 2})["train.num_epoch"]
    assert both == "is ignored: train.num_rollout = 4 is the length of the run (B17)"
    assert "above 0" in problems({"train.num_epoch": 0})["train.num_epoch"]
    own = {"train.num_rollout": None, "train.num_epoch": 2, "data.global_dataset": False}
    assert "reads no prompts" in problems(own)["train.num_epoch"]


@pytest.mark.parametrize(("first", "fine"), [(0, True), (3, True), (4, False), (9, False)])
def test_the_first_iteration_lies_before_the_end(
    load: Load, problems: Texts, first: int, fine: bool
) -> None:
    changes = {"train.start_rollout_id": first}
    if fine:
        assert load(changes).train.start_rollout_id == first
    else:
        found = problems(changes)["train.start_rollout_id"]
        assert found.startswith(f"must be below train.num_rollout = 4, got {first}")


@pytest.mark.parametrize(
    ("variables", "said"),
    [
        ({"OMP_NUM_THREADS": "1"}, "OMP_NUM_THREADS: it is read when the process starts"),
        ({"LD_PRELOAD": "x.so"}, "export it before drl run"),
        ({"PYTHONHASHSEED": "0"}, "PYTHONHASHSEED"),
        ({"CUDA_VISIBLE_DEVICES": "1"}, "CUDA_VISIBLE_DEVICES"),
        ({"A B": "1"}, "got 'A B'"),
        ({"ACME": "a\0b"}, "got 'ACME'"),
    ],
)
def test_variables_that_come_too_late_or_are_none_are_refused(
    problems: Texts, variables: dict[str, str], said: str
) -> None:
    assert said in problems({"train.env": variables})["train.env"]


def test_variables_are_text(problems: Texts, load: Load) -> None:
    assert load({"train.env": {"NCCL_DEBUG": "INFO"}}).train.env == {"NCCL_DEBUG": "INFO"}
    assert load(sets=['train.env={NCCL_DEBUG="INFO"}']).train.env == {"NCCL_DEBUG": "INFO"}
    assert problems({"train.env": {"NCCL_DEBUG": 1}})


def test_variables_are_set_for_a_while_and_taken_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ACME_OLD", "before")
    monkeypatch.delenv("ACME_NEW", raising=False)

    def work() -> None:
        with training_environment({"ACME_OLD": "during", "ACME_NEW": "new"}):
            assert (os.environ["ACME_OLD"], os.environ["ACME_NEW"]) == ("during", "new")
            raise RuntimeError

    with pytest.raises(RuntimeError):
        work()
    assert os.environ["ACME_OLD"] == "before"
    assert "ACME_NEW" not in os.environ


def test_options_of_a_table_inside_a_section_are_explained_and_kept(
    load: Load, catalog: Any
) -> None:
    assert "true or false" in explain("debug.ci.enabled", catalog)
    assert "{enabled, metric_key, metric_threshold}" in explain("debug.ci", catalog)
    with pytest.raises(BadInput, match=r"debug\.ci\.metric: .*did you mean 'metric_key'"):
        explain("debug.ci.metric", catalog)
    recipe = load(CI)
    assert recipe.origins["debug.ci.metric_key"] == "recipe.toml"
    assert load().origins["debug.ci.metric_key"] == "default"
    assert recipe.resolved()["debug"]["ci"] == {
        "enabled": True,
        "metric_key": "eval/heldout",
        "metric_threshold": 0.5,
    }

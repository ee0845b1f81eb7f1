"""What of a recipe changed since a run was started, and what that means."""

from __future__ import annotations

import pytest

from drl.checkpoint.differences import CHANGES, HARMLESS, differences, flat, shown, table

BEFORE = {
    "optimizer.lr": 1e-3,
    "train.num_rollout": 4,
    "run.name": "a",
    "lora.rank": 4,
    "sde.type": "cps",
}


def keys(found, *, matters):
    return [one.key for one in found if one.matters == matters]


def test_equal_recipes_differ_in_nothing():
    assert differences(BEFORE, dict(BEFORE), []) == []


def test_what_an_iteration_depends_on_is_told_apart():
    now = BEFORE | {"optimizer.lr": 2e-3, "train.num_rollout": 8, "run.name": "b"}
    found = differences(BEFORE, now, [])
    assert keys(found, matters=True) == ["optimizer.lr"]
    assert keys(found, matters=False) == ["run.name", "train.num_rollout"]


@pytest.mark.parametrize(
    "key",
    [
        "run.directory",
        "logging.loggers",
        "checkpoint.keep_last",
        "eval.interval",
        "cluster.device",
        "cluster.offload_train",
        "model.gradient_checkpointing",
        "model.checkpointed_share",
        "rollout.server_concurrency",
        "rollout.router_timeout",
        "rollout.router_max_connections",
        "rollout.router_failure_threshold",
        "rollout.distributed_post",
        "rollout.parser_num_workers",
    ],
)
def test_these_never_change_an_iteration(key):
    (found,) = differences({key: 1}, {key: 2}, [])
    assert not found.matters


@pytest.mark.parametrize(
    "key",
    [
        "train.seed",
        "train.forward_dtype",
        "lora.rank",
        "ema.enabled",
        "reward.type",
        "rollout.patch_groups",
    ],
)
def test_these_always_do(key):
    (found,) = differences({key: 1}, {key: 2}, [])
    assert found.matters


def test_what_one_side_does_not_have_is_a_difference():
    (gone,) = differences(BEFORE, {k: v for k, v in BEFORE.items() if k != "lora.rank"}, [])
    assert (gone.key, gone.was, gone.now) == ("lora.rank", 4, None)
    (new,) = differences(BEFORE, BEFORE | {"sde.noise": 1}, [])
    assert (new.key, new.was, new.now) == ("sde.noise", None, 1)


def test_a_derived_option_may_be_free():
    (found,) = differences({"optimizer.lr_decay_iters": 4}, {}, ["optimizer.lr_decay_iters"])
    assert not found.matters


def test_the_table_has_aligned_columns_and_says_what_is_allowed():
    now = BEFORE | {"optimizer.lr": 0.002, "lora.rank": 8, "run.name": "b"}
    lines = table(differences(BEFORE, now, []), ["lora.rank"])
    assert lines == [
        "option        was    is     meaning",
        f"lora.rank     4      8      {CHANGES}, allowed",
        f"optimizer.lr  0.001  0.002  {CHANGES}",
        f"run.name      'a'    'b'    {HARMLESS}",
    ]


def test_long_values_are_shortened_in_the_middle():
    text = shown("/a/very/long/path/" * 5 + "end")
    assert len(text) == 40
    assert text.startswith("'/a/very/long")
    assert text.endswith("end'")
    assert shown(None) == "unset"


def test_tables_become_dotted_keys():
    nested = {"a": {"b": {"c": 1}, "d": [1, {"e": 2}]}, "f": 3}
    assert flat(nested) == {"a.b.c": 1, "a.d": [1, {"e": 2}], "f": 3}

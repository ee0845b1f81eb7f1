"""Rules of the trainer's ranks."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

Problems = Callable[..., dict[str, str]]
Warnings = Callable[..., dict[str, str]]
Load = Callable[..., Any]
RANKS = "cluster.actor_num_gpus_per_node"


@pytest.mark.parametrize(
    ("changes", "path", "said"),
    [
        (
            {"cluster.actor_num_nodes": 2},
            "cluster.actor_num_nodes",
            "must be 1 with cluster.launcher",
        ),
        ({RANKS: 0}, RANKS, "must be above 0"),
        (
            {RANKS: 2, "cluster.device": "cuda:1"},
            "cluster.device",
            "must be 'cuda' or 'cpu' with 2 ranks",
        ),
        ({RANKS: 2, "cluster.device": "cuda:1"}, "cluster.device", "rank r is on cuda:r"),
        ({"cluster.device": "mps"}, "cluster.device", "must match ^(auto|cpu|cuda"),
        (
            {RANKS: 4, "train.dp_replicate_size": 3},
            "train.dp_replicate_size",
            f"must divide the number of ranks ({RANKS} = 4), got 3",
        ),
        (
            {"train.dp_replicate_size": 2},
            "train.dp_replicate_size",
            "must divide the number of ranks",
        ),
        (
            {"train.cpu_offload": True, "cluster.device": "cuda"},
            "train.cpu_offload",
            "needs GPUs and sharded weights",
        ),
        (
            {"train.cpu_offload": True, RANKS: 2, "cluster.device": "cpu"},
            "train.cpu_offload",
            "needs GPUs and sharded weights",
        ),
        (
            {"cluster.distributed_timeout_minutes": 0},
            "cluster.distributed_timeout_minutes",
            "above 0",
        ),
        ({"model.load": "rank0"}, "model.load", "broadcast"),
        ({"train.reduce_dtype": "fp8"}, "train.reduce_dtype", "bf16"),
    ],
)
def test_what_ranks_cannot_do(
    problems: Problems, changes: dict[str, Any], path: str, said: str
) -> None:
    found = problems(changes)
    assert list(found) == [path]
    assert said in found[path]


def test_what_one_rank_does_not_read_is_noted(warnings: Warnings) -> None:
    for path, value in (
        ("train.reduce_dtype", "bf16"),
        ("model.load", "all_ranks"),
        ("train.shard_frozen", "never"),
    ):
        assert "is not used: there is one rank" in warnings({path: value})[path]
        assert path not in warnings({path: value, RANKS: 2, "lora.enabled": True})


def test_full_weights_are_sharded_whatever_the_base_of_adapters_does(
    warnings: Warnings, problems: Problems
) -> None:
    full = {RANKS: 2, "train.shard_frozen": "never", "lora.enabled": False}
    assert "full weights are trained" in warnings(full)["train.shard_frozen"]
    offloaded = {
        RANKS: 2,
        "lora.enabled": True,
        "train.shard_frozen": "never",
        "train.cpu_offload": True,
        "cluster.device": "cuda",
    }
    assert "needs sharded weights" in problems(offloaded)["train.cpu_offload"]


def test_samples_that_do_not_spread_evenly_are_noted_where_they_can_be_changed(
    warnings: Warnings,
) -> None:
    # 16 samples in 2 optimizer steps
    assert RANKS not in warnings({RANKS: 4})
    assert "B5: 8 samples per optimizer step" in warnings({RANKS: 3})[RANKS]
    given = {RANKS: 3, "train.global_batch_size": 8, "train.num_steps_per_rollout": None}
    assert "do not spread evenly over 3 ranks" in warnings(given)["train.global_batch_size"]


def test_offloading_and_copies_fit_a_machine_with_gpus(load: Load) -> None:
    recipe = load(
        {
            RANKS: 4,
            "train.dp_replicate_size": 2,
            "train.cpu_offload": True,
            "cluster.device": "cuda",
        },
        cuda=True,
    )
    assert (recipe.cluster.actor_num_gpus_per_node, recipe.train.dp_replicate_size) == (4, 2)
    assert load().cluster.actor_num_gpus_per_node == 1


OFFLOADS = ("cluster.offload", "cluster.offload_train", "cluster.offload_rollout")


@pytest.mark.parametrize("path", OFFLOADS)
def test_offloading_without_an_engine_is_refused(problems: Problems, path: str) -> None:
    found = problems({path: True, "train.train_only": True})
    assert "no engine samples" in found[path]


@pytest.mark.parametrize("path", OFFLOADS)
def test_a_replay_of_an_offloading_recipe_leaves_that_out(
    warnings: Warnings, tmp_path: Path, path: str
) -> None:
    """A replay is the run's own recipe with one option more."""
    (tmp_path / "dumped-0").write_text("")
    files = str(tmp_path / "dumped-{rollout_id}")
    replay = {"debug.load_rollout_data": files, "train.num_rollout": 1, "cluster.device": "cuda"}
    assert "no engine samples" in warnings({path: True, **replay})[path]


@pytest.mark.parametrize("path", OFFLOADS)
def test_offloading_on_the_cpu_is_said_to_be_of_no_use(warnings: Warnings, path: str) -> None:
    assert "is of no use" in warnings({path: True, "cluster.device": "cpu"})[path]
    assert path not in warnings({path: True, "cluster.device": "cuda"})
    assert path not in warnings({path: False, "cluster.device": "cpu"})


def test_what_is_elsewhere_already_has_nothing_to_leave(warnings: Warnings) -> None:
    away = {"train.cpu_offload": True, "cluster.device": "cuda", RANKS: 2}
    assert "on the CPU already" in warnings({"cluster.offload_train": True, **away})[OFFLOADS[1]]
    assert OFFLOADS[2] not in warnings({"cluster.offload_rollout": True, **away})


def test_engines_keep_their_memory_where_nothing_is_trained(warnings: Warnings) -> None:
    only = {"debug.rollout_only": True, "cluster.device": "cuda"}
    assert "nothing is trained" in warnings({"cluster.offload_rollout": True, **only})[OFFLOADS[2]]
    assert not set(OFFLOADS) & set(warnings({"cluster.offload_train": True, **only}))

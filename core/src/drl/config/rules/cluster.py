"""Rules of the trainer's ranks: how many, on which devices, how weights lie on them."""

from __future__ import annotations

from collections.abc import Iterator

from drl.config.draft import Draft
from drl.errors import Problem

RANKS = "cluster.actor_num_gpus_per_node"


def one_machine(draft: Draft) -> Iterator[Problem]:
    """The inline launcher starts processes on this machine alone."""
    nodes = draft.get("cluster.actor_num_nodes")
    if nodes > 1:
        yield Problem(
            "cluster.actor_num_nodes",
            f"must be 1 with cluster.launcher = 'inline', got {nodes}; use more ranks on one machine "
            f"({RANKS})",
        )


def device_of_each_rank(draft: Draft) -> Iterator[Problem]:
    """Rank r is on cuda:r, so several ranks need the plain name of the kind of device."""
    ranks, device = draft.get(RANKS), draft.get("cluster.device")
    if ranks > 1 and device not in {"cpu", "cuda"}:
        yield Problem(
            "cluster.device",
            f"must be 'cuda' or 'cpu' with {ranks} ranks ({RANKS}), got {device!r}: rank r is on cuda:r; "
            "choose GPUs by CUDA_VISIBLE_DEVICES",
        )


def copies_of_shards(draft: Draft) -> Iterator[Problem]:
    """Every copy of the weights is spread over equally many ranks."""
    ranks, copies = draft.get(RANKS), draft.get("train.dp_replicate_size")
    if ranks % copies:
        yield Problem(
            "train.dp_replicate_size",
            f"must divide the number of ranks ({RANKS} = {ranks}), got {copies}",
        )


def weights_on_the_cpu(draft: Draft) -> Iterator[Problem]:
    """Offloading is a property of shards on GPUs."""
    if not draft.get("train.cpu_offload"):
        return
    if draft.get(RANKS) == 1 or not draft.get("cluster.device").startswith("cuda"):
        yield Problem(
            "train.cpu_offload",
            f"needs GPUs and sharded weights: cluster.device = 'cuda' and {RANKS} above 1",
        )
    elif draft.get("train.shard_frozen") == "never" and draft.get("lora.enabled"):
        yield Problem(
            "train.cpu_offload",
            "needs sharded weights; set train.shard_frozen to 'always' or 'auto', which shard with it",
        )


def options_of_ranks(draft: Draft) -> Iterator[Problem]:
    """One rank adds no gradients up and sends no weights; full weights are always sharded."""
    if draft.get(RANKS) > 1:
        if draft.changed("train.shard_frozen") and not draft.get("lora.enabled"):
            text = "is not used: full weights are trained and always sharded (lora.enabled)"
            yield Problem("train.shard_frozen", text, "warning")
        return
    for path in ("train.reduce_dtype", "train.shard_frozen", "train.cpu_backend", "model.load"):
        if draft.changed(path):
            yield Problem(path, f"is not used: there is one rank ({RANKS})", "warning")


def even_ranks(draft: Draft) -> Iterator[Problem]:
    """B5: the samples of an optimizer step should spread evenly over the ranks."""
    ranks, samples = draft.get(RANKS), draft.get("train.global_batch_size")
    if samples is not None and samples % ranks:
        path = "train.global_batch_size" if draft.given("train.global_batch_size") else RANKS
        yield Problem(
            path,
            f"B5: {samples} samples per optimizer step do not spread evenly over {ranks} ranks; "
            "some ranks compute filler meanwhile",
            "warning",
        )


OFFLOADS = ("cluster.offload", "cluster.offload_train", "cluster.offload_rollout")


def offloading(draft: Draft) -> Iterator[Problem]:
    """Taking turns on a device needs two sides and a device that is worth leaving."""
    asked = [path for path in OFFLOADS if draft.get(path)]
    for path in asked:
        if draft.get("train.train_only"):
            text = "means nothing here: no engine samples (train.train_only); leave it out"
            yield Problem(path, text)
        elif draft.get("debug.load_rollout_data") is not None:  # of a recipe that has an engine
            text = "is not used: no engine samples (debug.load_rollout_data)"
            yield Problem(path, text, "warning")
        elif not draft.get("cluster.device").startswith("cuda"):
            text = "is of no use: trainer and engine compute on the CPU, where memory has no other place"
            yield Problem(path, text, "warning")
        elif path != OFFLOADS[2] and draft.get("train.cpu_offload"):
            text = "moves no trainer: its weights are on the CPU already (train.cpu_offload)"
            yield Problem(path, text, "warning")
        elif path == OFFLOADS[2] and draft.get("debug.rollout_only"):
            yield Problem(path, "is not used: nothing is trained (debug.rollout_only)", "warning")


CLUSTER_RULES = (
    one_machine,
    device_of_each_rank,
    copies_of_shards,
    weights_on_the_cpu,
    options_of_ranks,
    even_ranks,
    offloading,
)

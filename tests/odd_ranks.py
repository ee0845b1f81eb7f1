"""Rollouts that no number divides on real ranks, held to one rank; every rank's process runs this."""

from __future__ import annotations

import traceback
from dataclasses import replace

import torch
from ranked_trainer import WIDTH, gradients, make_trainer

from drl.model.parallel import Ranks
from drl.model.trainer import Trainer
from drl.stages.shards import Tile, build_shards
from drl.testing import make_pair
from drl.types import Pair, Shard

CASES = (
    {"samples": 5, "micro_batch_size": 2},
    {"samples": 7, "micro_batch_size": 4, "split": "stride"},
    {"samples": 2, "micro_batch_size": 1},
    {"samples": 7, "micro_batch_size": 1, "tile": Tile(samples=2, steps=2)},
    {
        "samples": 5,
        "micro_batch_size": 1,
        "split": "stride",
        "tile": Tile(samples=1, steps=3, order="timestep_major"),
    },
)

OUTCOMES: dict[int, str] = {}
"""What the ranks of the last world said about each case; "" is good."""


def masked_units(samples: int) -> list[list[Pair]]:
    """Return units of three steps; every fourth sample is masked."""
    units = [
        [make_pair(id=(n, t), unit=n, seed=10 * n + t, latent=(WIDTH,)) for t in range(3)]
        for n in range(samples)
    ]
    return [
        [replace(pair, weight=0.0) if pair.unit % 4 == 1 else pair for pair in unit]
        for unit in units
    ]


def shards_for(case: dict, ranks: int) -> list[Shard]:
    layout = {name: value for name, value in case.items() if name != "samples"}
    units = masked_units(case["samples"])
    return build_shards(units, steps=2, ranks=ranks, rollout_id=0, **layout)


def compare(ranks: Ranks, case: dict) -> None:
    """Every optimizer step has the gradient, and the figures, of one rank with one micro-batch."""
    whole = {"samples": case["samples"], "micro_batch_size": 3 * case["samples"]}
    alone, together = make_trainer(lora=True), make_trainer(ranks, lora=True)
    pairs = zip(
        alone.train(shards_for(whole, 1)),
        together.train(shards_for(case, ranks.world)),
        strict=True,
    )
    for expected, report in pairs:
        assert report.skipped == expected.skipped
        found = gradients(together)
        for name, right in gradients(alone).items():
            size = max(right.abs().max().item(), 1.0)
            torch.testing.assert_close(found[name], right, rtol=1e-4, atol=2e-6 * size)
        assert report.metrics.keys() == expected.metrics.keys()
        for name, value in expected.metrics.items():
            torch.testing.assert_close(report.metrics[name], value, rtol=1e-4, atol=1e-7)


def run_cases(ranks: Ranks) -> Trainer:
    """Run every case on every rank, and let rank 0 keep what they said."""
    OUTCOMES.clear()
    for number, case in enumerate(CASES):
        text = ""
        try:
            compare(ranks, case)
        except BaseException:
            text = f"rank {ranks.rank}:\n{traceback.format_exc()}"
        OUTCOMES[number] = "".join(ranks.gather(text))
    return make_trainer(ranks, lora=True)

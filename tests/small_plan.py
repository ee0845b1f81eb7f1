"""A model of round numbers to plan with: 1,000 weights, 100 of them adapted, adapters of 10."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

from drl.interfaces.outline import EngineOutline, Outline, Part
from drl.plan.anatomy import Bytes
from drl.plan.ledger import Footprint
from drl.plan.predict import Card, Prediction
from drl.plan.scenario import Scenario

OUTLINE = Outline(
    streams={"visual": (2, 5)},
    condition={"text": (3, 4)},
    text_tokens=3,
    parts=(
        Part(name="text_encoder", weight_bytes=5000, release='text = "released"'),
        Part(name="vae", weight_bytes=700),
    ),
    decode=None,
    decode_rows=4,
    decode_option="model.decode_rows",
)
BYTES = Bytes(
    elements=1000,
    adapted=100,
    frozen=2000,
    buffers=30,
    trained=40,
    trained_elements=10,
    compared=150,
)


class Linear:
    """A footprint that is so much a row."""

    def __init__(self, peak: int, kept: int, forward: float, backward: float) -> None:
        self.each = Footprint(peak=peak, kept=kept, forward_flops=forward, backward_flops=backward)

    def at(self, rows: int) -> Footprint:
        return Footprint(
            peak=rows * self.each.peak,
            kept=rows * self.each.kept,
            forward_flops=rows * self.each.forward_flops,
            backward_flops=rows * self.each.backward_flops,
        )


def footprints(share: float) -> Linear:
    """10 a row are kept whatever is recomputed, the other 90 only where nothing is."""
    kept = int(100 - 90 * share)
    return Linear(peak=max(kept, 30), kept=kept, forward=1e12, backward=(1 + share) * 1e12)


def recorded(rows: int, *, applied: bool) -> int:
    """More than a forward's 20 a row: segments."""
    return rows * (35 if applied else 30)


ANATOMY: Any = SimpleNamespace(
    outline=OUTLINE,
    bytes=BYTES,
    training=footprints,
    inference=Linear(peak=20, kept=0, forward=1e12, backward=0),
    recorded=recorded,
    decoding=Footprint(peak=400),
    row_bytes=40,
    condition_bytes=48,
)

SCENARIO = Scenario(
    samples=16,
    num_steps=5,
    branches=1,
    batched=False,
    pixels=1_000_000,
    engine_rows=8,
    own_weights="shared",
    applied=False,
    graphs=False,
    engine_compiled=False,
    rollout=True,
    optimizer_steps=1,
    micro_batches=4,
    rows=8,
    rank_pairs=32,
    row_option="train.micro_batch_size",
    row_steps=1,
    rows_per_pair=1,
    trained_branches=1,
    pairs_per_step=32,
    pairs_per_sample=2,
    extra_passes=0,
    rescored=False,
    checkpointed=0.0,
    compiled=False,
    adapters=True,
    optimizer_states=2,
    copies=0,
    shards=1,
    offload_train=False,
    offload_rollout=False,
    decode_rows=4,
    released=frozenset(),
    prompts=2,
)
ENGINE = EngineOutline(
    rows=8,
    weights="shared",
    weights_option="rollout.weights",
    graphs_option="rollout.graphs",
    rows_option="rollout.rows",
)
CARD = Card(name="Card", torch="2.11.0")


def prediction(**changes: Any) -> Prediction:
    return Prediction(
        card=CARD,
        anatomy=ANATOMY,
        scenario=replace(SCENARIO, **changes),
        engine=ENGINE,
        dtype="bf16",
        rank=4,
    )

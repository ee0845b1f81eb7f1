"""Matrix products of one iteration, counted on the model itself: what is useful, and what is recomputed."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from drl.plan.anatomy import Anatomy
    from drl.plan.scenario import Scenario


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """FLOP of one iteration on one device (2 per multiply-add), and the calls that they come in.

    ``sampling``: the engine's forwards, filler rows included, ``applied`` of it by adapters. ``training``:
    forward and backward as far as something is trained by them. ``recomputed``: second forwards of checkpointed
    blocks, which are time but no use. ``scored``: forwards without gradient in training (old policy, reference,
    old log-probs). ``megapixels``: decoded, filler included. ``pushed``: bytes of a push.
    """

    sampling: float
    applied: float
    sampling_calls: int
    megapixels: float
    decodes: int
    training: float
    micro_batches: int
    recomputed: float
    scored: float
    scored_calls: int
    pushed: int
    pairs: int

    @property
    def trainers(self) -> float:
        """All that the trainer does."""
        return self.training + self.recomputed + self.scored

    @property
    def total(self) -> float:
        """All of it."""
        return self.sampling + self.trainers


def work_of(anatomy: Anatomy, scenario: Scenario) -> Work:
    """Return the work of one iteration on one device."""
    trained = anatomy.training(0.0).at(1)
    forward = anatomy.inference.at(1).forward_flops
    beside = 0.0
    if scenario.adapters and scenario.applied:
        beside = trained.forward_flops - forward
    batches = -(-scenario.samples // scenario.engine_rows) if scenario.rollout else 0
    decodes = batches * -(-scenario.engine_rows // scenario.decode_rows)
    micro_batches = scenario.optimizer_steps * scenario.micro_batches
    rows = micro_batches * scenario.rows * scenario.rows_per_pair * scenario.trained_branches
    again = 0.0
    if scenario.checkpointed:
        again = (
            anatomy.training(scenario.checkpointed).at(1).backward_flops - trained.backward_flops
        )
    later = 0.0
    if scenario.rescored:
        later = (scenario.optimizer_steps - 1) / scenario.optimizer_steps
    passes = scenario.extra_passes + later
    held = anatomy.bytes
    sampled = batches * scenario.engine_rows * scenario.num_steps * scenario.branches
    return Work(
        sampling=sampled * (forward + beside),
        applied=sampled * beside,
        sampling_calls=batches
        * scenario.num_steps
        * (1 if scenario.batched else scenario.branches),
        megapixels=decodes * scenario.decode_rows * scenario.pixels / 1e6,
        decodes=decodes,
        training=rows * (trained.forward_flops + trained.backward_flops),
        micro_batches=micro_batches,
        recomputed=rows * again,
        scored=passes * rows * trained.forward_flops,
        scored_calls=round(passes * micro_batches),
        pushed=int(held.trained * scenario.rank_factor) if scenario.rollout else 0,
        pairs=scenario.optimizer_steps * scenario.pairs_per_step,
    )
